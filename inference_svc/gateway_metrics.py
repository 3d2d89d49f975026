"""The metrics by which gateways route (`vllm:*`). Their names and labels are not ours to change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from inference_svc.core import EngineStatus, ResidentAdapter
from inference_svc.metric_definitions import family, sample

MAX_LOADED_SERIES = 2000
"""Of names of resident adapters: the last used ones."""
MAX_LISTED_NAMES = 512
"""In one label."""

_LEVELS = {"device": "gpu", "host": "cpu"}
"""Our tiers in the gateways' words."""

Names = Mapping[str, Sequence[str]]
"""The names known to point to a digest; of what has none, the digest is shown."""


def gateway_metrics(
    status: EngineStatus, residents: Sequence[ResidentAdapter], names: Names, *, max_loras: int
) -> Iterator[Metric]:
    """`residents` are all on the device, and of the host tier as many as shall be shown."""
    yield from _requests(status, names, max_loras)
    yield _loaded(residents, names)
    num_on_device = sum(adapter.tier == "device" for adapter in residents)
    yield sample("vllm:num_gpu_loaded_lora_adapters", num_on_device)
    yield sample("vllm:max_gpu_lora_adapters", max_loras)
    loads = family("vllm:lora_adapter_load_seconds")
    times = status.histograms.get("load_seconds")
    if times is not None:
        loads.add_metric([], sum(times.counts), times.sum_seconds)
    yield loads


def _requests(status: EngineStatus, names: Names, max_loras: int) -> Iterator[Metric]:
    used, capacity = status.memory.get("kv_pages", (0, 0))
    yield sample("vllm:num_requests_running", status.num_running)
    yield sample("vllm:num_requests_waiting", status.num_waiting)
    yield sample("vllm:kv_cache_usage_perc", used / capacity if capacity else 0.0)
    running = _joined_names(status.running_digests, names)
    waiting = _joined_names(status.waiting_digests, names)
    yield sample("vllm:lora_requests_info", time.time(), str(max_loras), running, waiting)


def _loaded(residents: Sequence[ResidentAdapter], names: Names) -> Metric:
    loaded = family("vllm:lora_adapter_loaded")
    for adapter in residents:
        labels = (_LEVELS[adapter.tier], str(adapter.pinned).lower(), str(adapter.rank))
        for name in names.get(adapter.digest) or [adapter.digest]:
            if len(loaded.samples) >= MAX_LOADED_SERIES:
                break
            loaded.add_metric((name, *labels), 1.0)
    return loaded


def _joined_names(digests: Sequence[str], names: Names) -> str:
    found = sorted(name for digest in digests for name in names.get(digest) or [digest])
    return ",".join(found[:MAX_LISTED_NAMES])
