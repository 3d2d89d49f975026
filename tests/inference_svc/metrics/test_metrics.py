"""Scrapes of the service, over HTTP, parsed as scrapers do."""

import time
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference_svc.engine.control.status_types import (
    EngineStatus,
    RankStatus,
    ResidentAdapter,
    TierStatus,
)
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.metrics.definitions import DEFINITIONS
from inference_svc.metrics.engine import Snapshot
from inference_svc.metrics.gateway_routing import MAX_LISTED_NAMES, MAX_LOADED_SERIES
from inference_svc.metrics.requests import Metrics, RequestEnd
from inference_svc.metrics.top_adapters import BASE
from servicekit.telemetry.histogram import HistogramState
from servicekit.telemetry.metrics_server import MetricsServer

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
TIER = TierStatus(
    used_bytes=64,
    capacity_bytes=128,
    pinned_bytes=32,
    largest_free_bytes=48,
    num_free_ranges=2,
    num_images=3,
    hits=9,
    misses=4,
    evictions={"request": 5, "aged": 1},
)
STATE = HistogramState((0.001, 0.01), (3, 2, 1), 0.0625)
COLD = HistogramState((0.001, 0.01), (0, 0, 2), 3.0)
TAKEN_TIME_S = 1_700_000_000.0
STATUS = EngineStatus(
    num_running=2,
    num_waiting=3,
    waiting_digests=(B,),
    running_digests=(A,),
    memory={"kv_pages": (25, 100), "arena": (64, 128)},
    counters={"pulls": 2.0},
    histograms={"step_host_seconds": STATE},
    phases={
        "load_phase_seconds": {"pull": STATE},
        "load_seconds": {"host": STATE, "store": COLD},
    },
    gauges={"kv_pages_used": 25.0},
    tiers={"device": TIER},
    loads={"pulling": 1, "queued": 0},
)
SNAPSHOT = Snapshot(
    STATUS,
    (
        ResidentAdapter(A, "device", 640, 8, True, 1, 0.0, 0.25),
        ResidentAdapter(B, "host", 640, 16, False, 0, 0.0, 0.25),
    ),
    {A: ["upper", "team/shout"]},
    store_connected=True,
    taken_time_s=TAKEN_TIME_S,
)
PREFIX = "loadout_inference_"

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape_text(metrics: Metrics, accept: str = "text/plain") -> str:
    server = MetricsServer(metrics.registry, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request) as response:
            return str(response.read().decode())
    finally:
        server.close()


def scrape(metrics: Metrics) -> Samples:
    """Sample name -> labels -> value, over HTTP."""
    samples: Samples = {}
    for family in text_string_to_metric_families(scrape_text(metrics)):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def test_the_engines_histograms_are_cumulative() -> None:
    samples = scrape(Metrics(4, lambda: SNAPSHOT))
    name = f"{PREFIX}step_host_seconds"
    assert samples[f"{name}_bucket"] == {
        (("le", "0.001"),): 3,
        (("le", "0.01"),): 5,
        (("le", "+Inf"),): 6,
    }
    assert samples[f"{name}_sum"] == {(): 0.0625}
    assert samples[f"{name}_count"] == {(): 6}


def test_the_phases_of_loads_are_one_family() -> None:
    """The first is the front's, the others are the engine's."""
    metrics = Metrics(4, lambda: SNAPSHOT)
    metrics.resolve_times.observe(0.5)
    counts = scrape(metrics)[f"{PREFIX}load_phase_seconds_count"]
    assert counts == {(("phase", "resolve"),): 1, (("phase", "pull"),): 6}


def test_loads_from_the_host_tier_do_not_hide_those_from_the_store() -> None:
    samples = scrape(Metrics(4, lambda: SNAPSHOT))
    assert samples[f"{PREFIX}load_seconds_sum"] == {
        (("source", "host"),): 0.0625,
        (("source", "store"),): 3.0,
    }


def test_each_rank_has_its_series() -> None:
    """A server of one process has none."""
    first = RankStatus(0, 7, True, 900, 4, 3, 2, 5, 2.5, 0.5, 60, 0, 1, (0,))
    ranks = (first, replace(first, index=1, answers=False, exchange_s=0.25, stage=1))
    snapshot = replace(SNAPSHOT, status=replace(STATUS, ranks=ranks))
    samples = scrape(Metrics(4, lambda: snapshot))

    def of(name: str) -> list[float]:
        places = [(("rank", each), ("stage", each)) for each in ("0", "1")]
        return [samples[f"{PREFIX}rank_{name}"][place] for place in places]

    assert of("up") == [1, 0]
    assert of("resident_bytes") == [900, 900]
    assert of("steps_total") == [5, 5]
    assert of("step_seconds_total") == [2.5, 2.5]
    assert of("exchange_seconds_total") == [0.5, 0.25]
    assert of("pulled_bytes_total") == [60, 60]
    assert f"{PREFIX}rank_up" not in scrape(Metrics(4, lambda: SNAPSHOT))


def test_snapshot_age() -> None:
    def age_s(taken_time_s: float) -> float:
        snapshot = replace(SNAPSHOT, taken_time_s=taken_time_s)
        samples = scrape(Metrics(4, lambda: snapshot))
        return samples[f"{PREFIX}snapshot_age_seconds"][()]

    assert 30 <= age_s(time.time() - 30) < 60
    assert age_s(time.time() + 30) == 0, "the clock was set back"


def test_the_tiers() -> None:
    samples = scrape(Metrics(4, lambda: SNAPSHOT))
    device = (("tier", "device"),)
    for name, value in {
        "tier_used_bytes": 64,
        "tier_capacity_bytes": 128,
        "tier_pinned_bytes": 32,
        "tier_largest_free_bytes": 48,
        "tier_free_ranges": 2,
        "tier_images": 3,
        "tier_hits_total": 9,
        "tier_misses_total": 4,
    }.items():
        assert samples[PREFIX + name] == {device: value}
    assert samples[f"{PREFIX}tier_evictions_total"] == {
        (("reason", "request"), *device): 5,
        (("reason", "aged"), *device): 1,
    }
    assert samples[f"{PREFIX}loads_in_progress"][(("state", "pulling"),)] == 1


def test_the_gateway_contract() -> None:
    """Names and labels are what routers parse: not ours to change."""
    samples = scrape(Metrics(4, lambda: SNAPSHOT))
    assert samples["vllm:num_requests_running"] == {(): 2}
    assert samples["vllm:num_requests_waiting"] == {(): 3}
    assert samples["vllm:kv_cache_usage_perc"] == {(): 0.25}
    ((labels, unix_time_s),) = samples["vllm:lora_requests_info"].items()
    assert dict(labels) == {
        "max_lora": "4",
        "running_lora_adapters": "team/shout,upper",
        "waiting_lora_adapters": B,
    }
    assert unix_time_s == TAKEN_TIME_S
    loaded = [dict(labels) for labels in samples["vllm:lora_adapter_loaded"]]
    on_device = {"level": "gpu", "pinned": "true", "rank": "8"}
    assert loaded == [
        {"adapter_name": "upper", **on_device},
        {"adapter_name": "team/shout", **on_device},
        {"adapter_name": B, "level": "cpu", "pinned": "false", "rank": "16"},
    ]
    assert set(samples["vllm:lora_adapter_loaded"].values()) == {1}
    assert samples[f"{PREFIX}residency_series"] == {(("level", "gpu"),): 2, (("level", "cpu"),): 1}
    assert samples["vllm:num_gpu_loaded_lora_adapters"] == {(): 1}
    assert samples["vllm:max_gpu_lora_adapters"] == {(): 4}
    assert samples["vllm:lora_adapter_load_seconds_count"] == {(): 8}
    assert samples["vllm:lora_adapter_load_seconds_sum"] == {(): 3.0625}


def pick(text: str) -> tuple[float, list[str], list[str], int]:
    """Reads what routers read: the queue, the newest sample of the adapters that run and wait, and
    the limit. Everything but the queue comes in labels."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (queue,) = families["vllm:num_requests_waiting"].samples
    assert families["vllm:num_requests_waiting"].type == "gauge"
    newest = max(families["vllm:lora_requests_info"].samples, key=lambda sample: sample.value)
    assert set(newest.labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    running, waiting = (
        [name for name in newest.labels[f"{what}_lora_adapters"].split(",") if name]
        for what in ("running", "waiting")
    )
    return queue.value, running, waiting, int(newest.labels["max_lora"])


def test_a_router_reads_running_and_waiting() -> None:
    text = scrape_text(Metrics(4, lambda: SNAPSHOT))
    assert pick(text) == (3, ["team/shout", "upper"], [B], 4)
    nothing = EngineStatus(0, 0, (), (), {}, {})
    idle = Snapshot(nothing, (), {}, store_connected=False, taken_time_s=TAKEN_TIME_S)
    assert pick(scrape_text(Metrics(4, lambda: idle))) == (0, [], [], 4)


def test_gateway_series_are_bounded() -> None:
    digests = [f"sha256:{number:064}" for number in range(3000)]
    status = EngineStatus(0, 3000, tuple(digests), (), {}, {})
    residents = tuple(
        ResidentAdapter(digest, "host", 640, 8, False, 0, 0.0, 0.25) for digest in digests
    )
    snapshot = Snapshot(status, residents, {}, store_connected=True, taken_time_s=TAKEN_TIME_S)
    samples = scrape(Metrics(4, lambda: snapshot))
    assert len(samples["vllm:lora_adapter_loaded"]) == MAX_LOADED_SERIES
    assert samples[f"{PREFIX}residency_series"] == {
        (("level", "gpu"),): 0,
        (("level", "cpu"),): MAX_LOADED_SERIES,
    }
    ((labels, _),) = samples["vllm:lora_requests_info"].items()
    assert len(dict(labels)["waiting_lora_adapters"].split(",")) == MAX_LISTED_NAMES


def test_an_adapter_with_many_names_crowds_out_no_other() -> None:
    """Routers know an adapter by any of its names, but by none that is not there."""
    names = {A: [f"a{number:03}" for number in range(MAX_LISTED_NAMES)], B: ["z0", "z1"]}
    status = EngineStatus(2, 0, (), (A, B), {}, {})
    snapshot = Snapshot(status, (), names, store_connected=True, taken_time_s=TAKEN_TIME_S)
    _, running, _, _ = pick(scrape_text(Metrics(4, lambda: snapshot)))
    assert len(running) == MAX_LISTED_NAMES
    assert running == sorted(running)
    assert running[-3:] == ["a509", "z0", "z1"]


def test_requests_are_counted() -> None:
    metrics = Metrics(4, lambda: SNAPSHOT)
    metrics.count_rpc("Generate", "NOT_FOUND", "ADAPTER_NOT_FOUND")
    metrics.count_rpc("Generate", "OK")
    usage, timings = Usage(7, 4, 3), Timings(0.5, 0.25, 1.0)
    metrics.count_request(RequestEnd("stop", ("team/upper",), 3, 3.0, usage, timings))
    samples = scrape(metrics)
    by_code = (("code", "NOT_FOUND"), ("method", "Generate"))
    assert samples[f"{PREFIX}rpcs_total"][by_code] == 1
    rejected = (("method", "Generate"), ("reason", "ADAPTER_NOT_FOUND"))
    assert samples[f"{PREFIX}rejections_total"][rejected] == 1
    assert samples[f"{PREFIX}requests_total"] == {
        (("finish_reason", reason),): float(reason == "stop")
        for reason in ("stop", "length", "aborted", "cancelled", "error")
    }
    assert samples[f"{PREFIX}prompt_tokens_total"] == {(): 7}
    assert samples[f"{PREFIX}cached_prompt_tokens_total"] == {(): 4}
    assert samples[f"{PREFIX}generated_tokens_total"] == {(): 3}
    sums = {"queue": 0.5, "adapter_wait": 0.25, "first_token": 1.0, "request": 3.0}
    for name, seconds in sums.items():
        assert samples[f"{PREFIX}{name}_seconds_sum"] == {(): seconds}
        assert samples[f"{PREFIX}{name}_seconds_count"] == {(): 1}
    own = (("adapter", "team/upper"),)
    assert samples[f"{PREFIX}adapter_requests_total"][own] == 1
    assert samples[f"{PREFIX}adapter_generated_tokens_total"][own] == 3
    assert samples[f"{PREFIX}adapter_first_token_seconds_sum"][own] == 1.0
    assert samples[f"{PREFIX}adapter_load_wait_seconds_sum"][own] == 0.25
    assert samples[f"{PREFIX}memory_used_bytes"][(("area", "arena"),)] == 64
    assert samples[f"{PREFIX}memory_capacity_bytes"][(("area", "arena"),)] == 128
    assert samples[f"{PREFIX}kv_pages_used"] == {(): 25}
    assert samples[f"{PREFIX}store_connected"] == {(): 1}


def test_first_token_time_without_a_token() -> None:
    """Else the percentiles are best when nothing works."""
    metrics = Metrics(4, lambda: None)
    metrics.count_request(RequestEnd("aborted", (), 0, 3.0, Usage(7, 0, 0), Timings(1, 0, 3)))
    metrics.count_request(RequestEnd("length", (), 1, 1.0, Usage(7, 0, 1), Timings(1, 0, 1)))
    metrics.count_request(RequestEnd("cancelled", (), 0, 120.0))
    metrics.count_request(RequestEnd("cancelled", (), 1, 60.0))  # of this one nobody knows
    metrics.count_request(RequestEnd("error", (), 0, 60.0))  # it was answered
    samples = scrape(metrics)
    assert samples[f"{PREFIX}first_token_seconds_count"] == {(): 3}
    assert samples[f"{PREFIX}first_token_seconds_sum"] == {(): 124.0}
    assert samples[f"{PREFIX}queue_seconds_count"] == {(): 3}
    assert samples[f"{PREFIX}queue_seconds_sum"] == {(): 122.0}
    assert samples[f"{PREFIX}request_seconds_count"] == {(): 2}
    assert samples[f"{PREFIX}adapter_first_token_seconds_count"][(("adapter", BASE),)] == 1


def test_alerted_series_start_at_0() -> None:
    samples = scrape(Metrics(4, lambda: None))
    codes = ("DATA_LOSS", "INTERNAL", "OK", "UNAVAILABLE", "UNKNOWN")
    assert samples[f"{PREFIX}rpcs_total"] == {
        (("code", code), ("method", "Generate")): 0 for code in codes
    }
    routes = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    assert samples[f"{PREFIX}http_requests_total"] == {
        (("route", route), ("status", status)): 0
        for route in routes
        for status in ("200", "500", "503")
    }
    assert samples[f"{PREFIX}rejections_total"] == {
        (("method", method), ("reason", "QUEUE_FULL")): 0 for method in ("Generate", *routes)
    }


@pytest.mark.parametrize(
    ("name", "longest_s"), [("request", 1800), ("queue", 300), ("first_token", 300)]
)
def test_minutes_are_below_the_last_bound(name: str, longest_s: float) -> None:
    buckets = scrape(Metrics(4, lambda: None))[f"{PREFIX}{name}_seconds_bucket"]
    bounds_s = sorted(float(dict(labels)["le"]) for labels in buckets)
    assert {60, 120, 300} < set(bounds_s)
    assert bounds_s[-2:] == [longest_s, float("inf")]


def test_adapter_wait_of_requests_that_gave_up() -> None:
    """Or the percentiles would be those of the lucky."""
    metrics = Metrics(4, lambda: None)
    metrics.count_request(RequestEnd("error", ("team/upper",), 0, 10.0, gave_up=True))
    samples = scrape(metrics)
    assert samples[f"{PREFIX}adapter_wait_seconds_sum"] == {(): 10.0}
    assert samples[f"{PREFIX}request_seconds_count"] == {(): 0}
    assert samples[f"{PREFIX}adapter_errors_total"][(("adapter", "team/upper"),)] == 1


def test_without_a_snapshot_only_counters_are_exported() -> None:
    samples = scrape(Metrics(4, lambda: None))
    assert f"{PREFIX}prompt_tokens_total" in samples
    assert not any(name.startswith("vllm:") for name in samples)


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
        "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    ],
    ids=["prometheus-2.42", "prometheus-3"],
)
def test_names_do_not_depend_on_the_accept_header(accept: str) -> None:
    """OpenMetrics would have underscores for colons."""
    metrics = Metrics(4, lambda: SNAPSHOT)
    metrics.count_rpc("Generate", "NOT_FOUND", "ADAPTER_NOT_FOUND")
    text = scrape_text(metrics, accept)
    names = {f.name: {s.name for s in f.samples} for f in text_string_to_metric_families(text)}
    assert names["vllm:lora_requests_info"] == {"vllm:lora_requests_info"}
    assert names[f"{PREFIX}rejections"] == {f"{PREFIX}rejections_total"}


def test_formats_in_few_bits_have_their_code() -> None:
    metrics = Metrics(4, lambda: SNAPSHOT)
    assert "weight_format_info{" not in scrape_text(metrics)
    metrics.describe_weights([("int4, groups of 128", "native"), ("fp8, per output", "native")])
    text = scrape_text(metrics)
    for form in ("int4, groups of 128", "fp8, per output"):
        labels = f'format="{form}",kernels="native"'
        assert f"{PREFIX}weight_format_info{{{labels}}} 1.0" in text


def test_all_exported_metrics_are_defined() -> None:
    metrics = Metrics(4, lambda: SNAPSHOT)
    metrics.describe_server("base", "float32", "cpu", {"loadout": "1", "torch": "2"})
    metrics.describe_weights([("int4, groups of 128", "native")])
    known = {definition.name: definition for definition in DEFINITIONS.values()}
    for family in text_string_to_metric_families(scrape_text(metrics)):
        definition = known[family.name]
        assert family.type == definition.kind.value
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(definition.labels)
