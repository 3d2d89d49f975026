"""Both services as real processes under a mixed load, scraped by a real Prometheus with our rules:
whatever a dashboard or a rule asks for is there, and whatever is there is documented."""

from __future__ import annotations

import math
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapter_store import metric_definitions as store
from inference_svc import metric_definitions as inference
from tests.deploy.rules import metric, rules, selectors
from tests.together.dashboards import FOLDER, Dashboard
from tools.metric_docs import PATH as PAGE
from tools.mixed_load import MixedLoad
from tools.prometheus import Prometheus, Series
from tools.prometheus_package import programs
from tools.prometheus_rule import rule_files

RUN_S = 5.0
"""After everything has happened once: within what a rate looks back it has happened again."""
INTERVAL_S = 0.5
MIN_DASHBOARDS = 3
ALERTS, RECORDS = rules("alert"), rules("record")
PROVOKED = {"LoadoutDigestMismatch", "LoadoutThrash", "LoadoutKvPagesExhausted"}
"""By the load: a trainer expects another digest, and memory is short."""
TIMED = {"LoadoutColdLoadsSlow"}
"""A machine that is busy with other things is slow."""
ITS_OWN = re.compile(r"(scrape|ALERTS)(_\w+)?|up|(instance|instance_tier):\w+:\w+")
"""What Prometheus adds."""
GATEWAYS_NAME = re.compile(r"vllm:\w+ metric names should not contain ':'")


@dataclass(frozen=True)
class Watched:
    load: MixedLoad
    prometheus: Prometheus

    def gives_data(self, promql: str) -> bool:
        """Whether it has a value that is a number."""
        return any(map(_has_number, self.prometheus.query(promql)))


def _has_number(series: Series) -> bool:
    return not math.isnan(series.value)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder: Path = tmp_path_factory.mktemp("watched")
    with MixedLoad(folder / "load") as load:
        prometheus = Prometheus(
            folder / "prometheus",
            load.targets,
            labels={"namespace": "loadout"},
            interval_s=INTERVAL_S,
            rule_files=rule_files(),
        )
        with prometheus:
            prometheus.wait_up()
            load.wait_toured()
            load.run(RUN_S)
            yield Watched(load, prometheus)
            load.check()


@pytest.fixture(scope="module")
def dashboards(watched: Watched) -> list[Dashboard]:
    found = [Dashboard(path, watched.prometheus) for path in sorted(FOLDER.glob("*.json"))]
    assert len(found) >= MIN_DASHBOARDS, f"no dashboards in {FOLDER}"
    return found


def test_both_are_scraped(watched: Watched) -> None:
    up = {series.labels["job"]: series.value for series in watched.prometheus.query("up")}
    assert up == {"adapter-store": 1, "inference": 1}


def test_every_variable_of_every_dashboard_has_values(dashboards: list[Dashboard]) -> None:
    assert [name for dashboard in dashboards for name in dashboard.without_values] == []


def test_every_query_of_every_panel_gives_data(
    watched: Watched, dashboards: list[Dashboard]
) -> None:
    queries = [query for dashboard in dashboards for query in dashboard.queries()]
    assert len(queries) > 30
    assert [query for query in queries if not watched.gives_data(query.promql)] == []


def test_every_metric_of_a_dashboard_exists(watched: Watched, dashboards: list[Dashboard]) -> None:
    """Also of those that would be zero without one."""
    exported = names(watched)
    for dashboard in dashboards:
        for query in dashboard.queries():
            used = {metric(selector) for selector in selectors(query.promql)}
            assert used <= exported, f"{query.where}: {used - exported}"


def test_every_recording_rule_gives_data(watched: Watched) -> None:
    assert [name for name in RECORDS if not watched.gives_data(name)] == []


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_for_what_there_is(watched: Watched, name: str) -> None:
    """Each of its series without its matchers, as what they match is what should not happen."""
    watched.prometheus.query(ALERTS[name]["expr"])
    for selector in selectors(ALERTS[name]["expr"]):
        watched.prometheus.query(selector)
        assert watched.gives_data(metric(selector)), selector


def test_rules_are_evaluated_without_errors(watched: Watched) -> None:
    found = watched.prometheus.rules()
    assert {rule["name"] for rule in found} == ALERTS.keys() | RECORDS.keys()
    assert [rule for rule in found if rule["health"] != "ok"] == []


def test_alerts_are_about_what_the_load_does_and_nothing_else(watched: Watched) -> None:
    alerts = watched.prometheus.alerts()
    firing = {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}
    pending = {each["labels"]["alertname"] for each in alerts if each["state"] == "pending"}
    assert firing == {"LoadoutDigestMismatch"}
    assert pending - TIMED <= PROVOKED


def test_what_is_exported_is_documented_and_the_reverse(watched: Watched) -> None:
    documented = set(re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE))
    found = {_family(name) for name in names(watched) if not ITS_OWN.fullmatch(name)}
    assert found == documented


def test_promtool_finds_nothing_but_the_names_that_gateways_chose(watched: Watched) -> None:
    for [address] in watched.load.targets.values():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            text = response.read()
        command = [str(programs().promtool), "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, check=False)
        said = (done.stdout + done.stderr).decode()
        assert all(GATEWAYS_NAME.fullmatch(line) for line in said.splitlines() if line), said


def names(watched: Watched) -> set[str]:
    """Of all series."""
    return set(watched.prometheus.label_values("__name__"))


def _family(name: str) -> str:
    """A histogram's or summary's name without the suffix of one of its series."""
    for definition in (*inference.DEFINITIONS.values(), *store.DEFINITIONS.values()):
        if definition.kind.value in ("histogram", "summary"):
            suffix = name.removeprefix(definition.name)
            if suffix in ("_bucket", "_sum", "_count"):
                return definition.name
    return name
