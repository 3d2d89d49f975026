import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference_svc.core import (
    EngineStatus,
    FinishReason,
    HistogramState,
    ResidentAdapter,
    Timings,
    Usage,
)
from inference_svc.metrics import Metrics, MetricsServer, Snapshot

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
STATUS = EngineStatus(
    num_running=2,
    num_waiting=3,
    waiting_digests=(B,),
    running_digests=(A,),
    memory={"kv_pages": (25, 100), "arena": (64, 128)},
    counters={"slot_hits": 9.0, "pulls": 2.0, "load_seconds": 0.5},
    histograms={"step_host_seconds": HistogramState((0.001, 0.01), (3, 2, 1), 0.0625)},
)
SNAPSHOT = Snapshot(
    STATUS,
    (
        ResidentAdapter(A, "device", 640, 8, True, 1, 0.0, 0.25),
        ResidentAdapter(B, "host", 640, 16, False, 0, 0.0, 0.25),
    ),
    {A: ["upper", "team/shout"]},
    store_connected=True,
)


def scrape(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, over HTTP."""
    server = MetricsServer(metrics, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url) as response:
            text = response.read().decode()
    finally:
        server.close()
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def test_the_engines_histograms_are_cumulative() -> None:
    samples = scrape(Metrics(4, lambda: SNAPSHOT))
    name = "loadout_inference_step_host_seconds"
    assert samples[f"{name}_bucket"] == {
        (("le", "0.001"),): 3,
        (("le", "0.01"),): 5,
        (("le", "+Inf"),): 6,
    }
    assert samples[f"{name}_sum"] == {(): 0.0625}
    assert samples[f"{name}_count"] == {(): 6}


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
    assert unix_time_s == pytest.approx(time.time(), abs=60)
    loaded = [dict(labels) for labels in samples["vllm:lora_adapter_loaded"]]
    on_device = {"level": "gpu", "pinned": "true", "rank": "8"}
    assert loaded == [
        {"adapter_name": "upper", **on_device},
        {"adapter_name": "team/shout", **on_device},
        {"adapter_name": B, "level": "cpu", "pinned": "false", "rank": "16"},
    ]
    assert set(samples["vllm:lora_adapter_loaded"].values()) == {1}
    assert samples["vllm:num_gpu_loaded_lora_adapters"] == {(): 1}
    assert samples["vllm:max_gpu_lora_adapters"] == {(): 4}
    assert samples["vllm:lora_adapter_load_seconds_count"] == {(): 2}
    assert samples["vllm:lora_adapter_load_seconds_sum"] == {(): 0.5}


def test_our_own_numbers() -> None:
    metrics = Metrics(4, lambda: SNAPSHOT)
    metrics.count_rpc("Generate", "NOT_FOUND")
    metrics.count_finished(FinishReason.STOP, Usage(7, 4, 3), Timings(0.5, 0.25, 1.0), total_s=3.0)
    samples = scrape(metrics)
    prefix = "loadout_inference_"
    assert samples[f"{prefix}rpcs_total"] == {(("code", "NOT_FOUND"), ("method", "Generate")): 1}
    assert samples[f"{prefix}requests_total"] == {(("finish_reason", "stop"),): 1}
    assert samples[f"{prefix}prompt_tokens_total"] == {(): 7}
    assert samples[f"{prefix}cached_prompt_tokens_total"] == {(): 4}
    sums = {"queue": 0.5, "adapter_wait": 0.25, "first_token": 1.0, "inter_token": 1.0}
    for name, seconds in sums.items():
        assert samples[f"{prefix}{name}_seconds_sum"] == {(): seconds}
        assert samples[f"{prefix}{name}_seconds_count"] == {(): 1}
    assert samples[f"{prefix}slot_hits_total"] == {(): 9}
    assert samples[f"{prefix}memory_used_bytes"][(("area", "arena"),)] == 64
    assert samples[f"{prefix}memory_capacity_bytes"][(("area", "arena"),)] == 128
    assert samples[f"{prefix}store_connected"] == {(): 1}


def test_a_request_without_tokens_has_no_first_one() -> None:
    metrics = Metrics(4, lambda: None)
    metrics.count_finished(FinishReason.ABORTED, Usage(7, 0, 0), Timings(1, 0, 1), total_s=1.0)
    metrics.count_finished(FinishReason.LENGTH, Usage(7, 0, 1), Timings(1, 0, 1), total_s=1.0)
    samples = scrape(metrics)
    assert samples["loadout_inference_first_token_seconds_count"] == {(): 1}
    assert samples["loadout_inference_inter_token_seconds_count"] == {(): 0}


def test_before_the_engine_is_there_only_our_counters_show() -> None:
    samples = scrape(Metrics(4, lambda: None))
    assert "loadout_inference_prompt_tokens_total" in samples
    assert not any(name.startswith("vllm:") for name in samples)
