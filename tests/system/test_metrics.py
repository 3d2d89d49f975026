"""Both services as real processes under a few requests: all that they export is documented, and
what an incident needs is there."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from adapter_store.metrics import definitions as store_definitions
from inference_svc.metrics import definitions as inference_definitions
from loadout.errors import LoadoutError
from loadout.prometheus import parse
from tests.support.wait import until
from tests.system.services import Services

PAGE = (Path(__file__).parents[2] / "docs" / "observability" / "metrics.md").read_text()
ROUTED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return str(response.read().decode())


@pytest.fixture(scope="module")
def texts(services: Services) -> dict[str, str]:
    """Scrapes of both services after requests with and without an adapter, good and bad."""
    client = services.client
    for name in ("r3", "r16"):
        client.register(f"measured/{name}", services.source(name))
        assert list(
            client.generate("abc", adapter=f"measured/{name}", max_tokens=8, ignore_eos=True)
        )
    assert list(client.generate("abc", max_tokens=8, ignore_eos=True))
    with pytest.raises(LoadoutError):
        list(client.generate("abc", adapter="measured/gone"))
    with pytest.raises(LoadoutError):
        client.get("measured/gone")
    return {
        "store": read(services.store_metrics),
        "inference": read(services.inference_metrics),
    }


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


@pytest.mark.parametrize("service", ["store", "inference"])
def test_every_exported_name_is_defined_and_documented(texts: dict[str, str], service: str) -> None:
    module = {"store": store_definitions, "inference": inference_definitions}[service]
    known = {definition.name: definition for definition in module.DEFINITIONS.values()}
    documented = set(re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE))
    for family in families(texts[service]):
        definition = known[family.name]
        assert definition.exposed_name in documented
        assert family.type == definition.kind.value, family.name
        assert family.documentation == definition.help or family.name.startswith("process_")
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(definition.labels), sample


@pytest.mark.parametrize("service", ["store", "inference"])
def test_every_defined_metric_is_exported(texts: dict[str, str], service: str) -> None:
    module = {"store": store_definitions, "inference": inference_definitions}[service]
    exported = {family.name for family in families(texts[service])}
    defined = {each.name for each in module.DEFINITIONS.values()}
    # A hybrid exports these, and a server on a GPU: test_recurrent_states, test_registration.
    prefixes = ("loadout_inference_recurrent_", "loadout_inference_registered_bytes")
    others = {name for name in defined if name.startswith(prefixes)}
    assert not others & exported
    assert defined - others - exported == set()


def test_requests_are_counted(texts: dict[str, str]) -> None:
    inference, store = parse(texts["inference"]), parse(texts["store"])
    prefix = "loadout_inference_"
    for name in ("r3", "r16"):
        assert inference.one(f"{prefix}adapter_requests_total", adapter=f"measured/{name}") == 1
    rejected = {"method": "Generate", "reason": "ADAPTER_NOT_FOUND"}
    assert inference.one(f"{prefix}rejections_total", **rejected) >= 1
    for phase in ("schedule", "prepare", "forward", "sample", "settle"):
        found = inference.one(f"{prefix}step_phase_seconds_count", phase=phase)
        assert found == inference.one(f"{prefix}step_seconds_count") > 0
    parts = inference.sum(f"{prefix}step_phase_seconds_sum")
    assert 0 < parts < inference.one(f"{prefix}step_seconds_sum")
    # "resolve" may be 0: a request does not wait for a name that was looked up before it.
    assert inference.one(f"{prefix}load_phase_seconds_bucket", phase="resolve", le="+Inf") == (
        inference.one(f"{prefix}load_phase_seconds_count", phase="resolve")
    )
    for phase in ("wait", "pull"):
        assert inference.one(f"{prefix}load_phase_seconds_count", phase=phase) >= 2
    assert inference.one(f"{prefix}inter_token_seconds_count") >= 3 * 7
    assert inference.one(f"{prefix}sampled_tokens_total") >= 3 * 8
    assert inference.one(f"{prefix}tier_misses_total", tier="device") >= 2
    assert inference.one(f"{prefix}tier_images", tier="device") >= 2
    ended = inference.sum(f"{prefix}requests_total")
    assert ended >= inference.one(f"{prefix}request_seconds_count") >= 3
    assert store.one("loadout_store_rejections_total", method="GetAdapter", reason="NOT_FOUND") >= 1
    assert store.one("loadout_store_pull_wait_seconds_count") >= 2
    assert store.one("loadout_store_build_info") == 1


def test_routers_find_their_metrics(texts: dict[str, str]) -> None:
    metrics = parse(texts["inference"])
    for name in ROUTED:
        assert metrics.one(name) >= 0
    [info] = metrics.select("vllm:lora_requests_info")
    assert set(info.labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    loaded = metrics.select("vllm:lora_adapter_loaded", adapter_name="measured/r16")
    assert [dict(sample.labels) for sample in loaded] == [
        {"adapter_name": "measured/r16", "level": "gpu", "pinned": "false", "rank": "16"}
    ]
    assert metrics.one("vllm:lora_adapter_load_seconds_count") >= 2


def picked(text: str) -> tuple[float, list[str]]:
    """Returns what a picker of endpoints reads: how many requests run, and the adapters that the
    newest sample names; its value is its time."""
    found = {family.name: family for family in families(text)}
    [running] = found["vllm:num_requests_running"].samples
    newest = max(found["vllm:lora_requests_info"].samples, key=lambda sample: sample.value)
    assert abs(newest.value - time.time()) < 60
    assert int(newest.labels["max_lora"]) > 0
    names = newest.labels["running_lora_adapters"].split(",")
    return running.value, [name for name in names if name]


def test_routers_see_what_runs(services: Services, texts: dict[str, str]) -> None:
    ended = threading.Event()

    def generate() -> None:
        while not ended.is_set():
            services.client.complete("abc", adapter="measured/r3", max_tokens=200, ignore_eos=True)

    caller = threading.Thread(target=generate)
    caller.start()
    found: list[object] = []

    def is_seen() -> bool:
        num_running, names = found[:] = picked(read(services.inference_metrics))
        # Others may have registered the same content under other names.
        return num_running == 1 and "measured/r3" in names

    try:
        until(is_seen, what=lambda: str(found))
    finally:
        ended.set()
        caller.join()
