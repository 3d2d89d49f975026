"""The dashboards: as the code says, complete, and of nothing that there is not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from adapter_store.metrics import definitions as store_definitions
from inference_svc.metrics import definitions as inference_definitions
from servicekit.telemetry.metrics import Definition
from tests.support.deploy.manifests import ROOT
from tools.dashboards import limits, links
from tools.dashboards.__main__ import FOLDER, render
from tools.dashboards.board import in_sight
from tools.dashboards.limits import Limit
from tools.dashboards.preview.reading import Json, asked, expressions, names_in, panels, variables

BOARDS: dict[str, Json] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))
}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in panels(board)]
NUM_COLUMNS = 24
MAX_BYTES = 200_000
"""Most bytes of a file: kubectl apply keeps a copy in an annotation, which may have 256 KiB."""

PROMETHEUS_OWN = {"up", "ALERTS"}
METRIC = re.compile(r"\b(?:up|ALERTS|process_\w+|[\w:]*loadout_[\w:]+|vllm:\w+)(?=\{)")
NOT_SHOWN = {
    "vllm:num_requests_running": "shown as requests_running",
    "vllm:num_requests_waiting": "shown as requests_waiting",
    "vllm:kv_cache_usage_perc": "shown as kv_pages_used of kv_pages_capacity",
    "vllm:lora_requests_info": "for routers: Prometheus drops it, a new series each time",
    "vllm:lora_adapter_loaded": "for routers: Prometheus drops it; `loadout top` lists residents",
    "vllm:num_gpu_loaded_lora_adapters": "shown as tier_images",
    "vllm:max_gpu_lora_adapters": "a setting, not a measurement",
    "vllm:lora_adapter_load_seconds": "shown as load_seconds, with percentiles",
    "loadout_inference_text_cache_entries": "no cause of anything: a miss takes milliseconds",
    "loadout_inference_text_cache_used_bytes": "at most a quarter of a GiB, by its own bound",
    "loadout_store_memory_locked": "the alert LoadoutStoreMemoryNotLocked shows it",
    "loadout_store_swap_bytes": "a fact of the machine, for the alert on unlocked memory",
    "loadout_store_shared_pulls_total": "for who sets --share-socket; the log has the reasons",
    "loadout_inference_store_shared_pulls_total": "the same, of the receiver",
    "loadout_inference_registered_images_total": "the same, of a server on a GPU",
    "loadout_inference_registered_bytes": "at most a GiB, for milliseconds",
    **{
        f"loadout_inference_{name}_total": "for who uses structured answers; see docs/structured.md"
        for name in (
            "structured_requests",
            "grammar_check_hits",
            "grammar_check_seconds",
            "grammar_opens",
            "grammar_cache_hits",
            "grammar_compile_seconds",
            "grammar_masks",
            "grammar_mask_seconds",
            "grammar_late_masks",
            "grammar_process_restarts",
        )
    },
    **{
        f"loadout_inference_{name}": "for who uses structured answers; see docs/structured.md"
        for name in ("grammar_rows", "grammar_slow_rows")
    },
    "loadout_inference_text_loads_total": "what is refused is shown as rejections, by reason",
    "loadout_inference_files_refused": "0 or 1, of which LoadoutFilesRefused alerts",
    "loadout_inference_weight_format_info": "a fact of the model: `loadout info` shows it",
    "loadout_store_files_refused": "0 or 1, of which LoadoutFilesRefused alerts",
    "loadout_store_volume_full": "0 or 1, of which LoadoutStoreVolumeExhausted alerts",
    "process_virtual_memory_bytes": "says nothing: models and arenas are mapped, not used",
}
"""Why no panel has it. A new metric belongs on a panel, or here with a reason."""

DEFINITIONS: dict[str, Definition] = {
    definition.exposed_name: definition
    for module in (store_definitions, inference_definitions)
    for definition in module.DEFINITIONS.values()
}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
EXPORTED = {
    name + suffix: name
    for name, definition in DEFINITIONS.items()
    for suffix in SUFFIXES.get(definition.kind.value, ("",))
}
"""Each series' name, and the metric it is of."""


def rules(name: str) -> list[Json]:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / f"{name}.rules.yml").read_text())
    return [rule for group in groups["groups"] for rule in group["rules"]]


def recorded() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for rule in rules("recording")}


def used_names() -> set[str]:
    """Returns the names of series in all queries, variables and annotations."""
    texts = [text for board in BOARDS.values() for text in expressions(board)]
    chosen = (v for board in BOARDS.values() for v in variables(board).values())
    texts += [asked(variable) for variable in chosen if variable["type"] == "query"]
    return {name for text in texts for name in METRIC.findall(text)}


def addresses(part: object) -> Iterator[str]:
    """Returns the targets of all links, wherever they are."""
    if isinstance(part, dict):
        if "url" in part:
            yield part["url"]
        for each in part.values():
            yield from addresses(each)
    elif isinstance(part, list):
        for each in part:
            yield from addresses(each)


def test_the_committed_ones_are_the_codes() -> None:
    found = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert found == render(), "run `make dashboards`"
    assert all(len(text) < MAX_BYTES for text in found.values())


@pytest.mark.parametrize("name", BOARDS)
def test_the_sdk_knows_every_field(name: str) -> None:
    """Also of the parts that it takes as plain data. What it does not know it would drop."""
    register_default_plugins()
    board = Dashboard.from_json(json.loads((FOLDER / f"{name}.json").read_text()))
    assert in_sight(json.loads(json.dumps(board, cls=JSONEncoder))) == BOARDS[name]


def test_uids_are_addresses_that_stay() -> None:
    assert {name: board["uid"] for name, board in BOARDS.items()} == {
        "fleet": "loadout-fleet",
        "adapters": "loadout-adapters",
        "store": "loadout-store",
    }
    assert {board["uid"]: board["title"] for board in BOARDS.values()} == links.TITLES


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_complete(name: str) -> None:
    board = BOARDS[name]
    assert board["tags"] == ["loadout"]
    assert board["refresh"]
    assert board["time"]["to"] == "now"
    assert board["description"].endswith(".")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert titles[0] == "Now"
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("name", BOARDS)
def test_panels_fill_the_grid(name: str) -> None:
    """Without gaps or overlaps, so that Grafana moves none of them."""
    places = [panel["gridPos"] for panel in BOARDS[name]["panels"]]
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, (one, other)
    height = max(place["y"] + place["h"] for place in places)
    assert all(place["x"] + place["w"] <= NUM_COLUMNS for place in places)
    assert sum(place["w"] * place["h"] for place in places) == NUM_COLUMNS * height


@pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{name}-{each['id']}" for name, each in PANELS]
)
def test_a_panel_says_what_it_shows(panel: Json) -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["description"].rstrip(".") != panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["type"] != "heatmap" or panel["options"]["yAxis"]["unit"]
    assert panel["datasource"] == source
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["expr"]
        assert target["datasource"] == source
        is_named = "legendFormat" in target
        assert is_named == (panel["type"] in ("timeseries", "heatmap")), "a legend for each line"


@pytest.mark.parametrize("name", BOARDS)
def test_variables_are_there_before_they_are_used(name: str) -> None:
    grafana = {"__rate_interval", "__range"}
    known = {"datasource"}
    for variable in variables(BOARDS[name]).values():
        if variable["type"] == "query":
            assert names_in(asked(variable)) <= known
            assert variable["multi"]
            assert variable["includeAll"]
        known.add(variable["name"])
    used = {each for text in expressions(BOARDS[name]) for each in names_in(text)}
    assert used <= known | grafana
    assert known - used == {"datasource"}, "one that changes nothing"


def test_links_lead_to_dashboards_and_variables_that_there_are() -> None:
    boards = {board["uid"]: board for board in BOARDS.values()}
    by_board = {uid: list(addresses(board)) for uid, board in boards.items()}
    for uid, found in by_board.items():
        targets = {re.match(r"/d/([\w-]+)", url)[1] for url in found}
        assert targets | {uid} == set(boards), "from each dashboard to the two others"
        for url in found:
            target = boards[re.match(r"/d/([\w-]+)", url)[1]]
            assert set(re.findall(r"[?&]var-(\w+)=", url)) <= set(variables(target))
    assert sum(len(found) for found in by_board.values()) > 20


def test_every_name_that_is_used_exists() -> None:
    names = used_names()
    assert len(names) > 100
    assert names - EXPORTED.keys() - recorded().keys() == PROMETHEUS_OWN


def test_every_metric_is_shown_or_has_a_reason() -> None:
    shown = {EXPORTED[name] for name in used_names() if name in EXPORTED}
    assert DEFINITIONS.keys() - shown == NOT_SHOWN.keys()


def test_limits_are_the_alerts() -> None:
    """A threshold that names an alert has the number that the alert waits for."""
    alerts = {rule["alert"]: rule["expr"] for rule in rules("alerts")}
    all_limits = [each for each in vars(limits).values() if isinstance(each, Limit)]
    named = [each for each in all_limits if each.alert]
    assert len(named) > 5
    for limit in named:
        compared = re.findall(
            r"[<>](?:\s|ignoring|group_left|\(\w+\))+([\d.]+)", alerts[limit.alert]
        )
        assert limit.value in map(float, compared), limit
