"""The metrics by which gateways route (`vllm:*`). Their names and labels are not ours to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest

from prometheus_client.core import Metric

from inference_svc.engine.status_types import EngineStatus, ResidentAdapter
from inference_svc.metrics.definitions import family, sample

LOADED = "vllm:lora_adapter_loaded"
MAX_LOADED_SERIES = 2000
"""Of names of resident adapters: the last used ones."""
MAX_LISTED_NAMES = 512
"""In one label."""

_LEVELS = {"device": "gpu", "host": "cpu"}
"""Our tiers in the gateways' words."""

Names = Mapping[str, Sequence[str]]
"""The names known to point to a digest; of what has none, the digest is shown."""


def gateway_metrics(
    status: EngineStatus,
    residents: Sequence[ResidentAdapter],
    names: Names,
    *,
    max_loras: int,
    taken_time_s: float,
) -> Iterator[Metric]:
    """`residents` are all on the device, and of the host tier as many as shall be shown. All this
    was so at `taken_time_s`, unix time."""
    yield from _requests(status)
    yield _requests_info(status, names, max_loras, taken_time_s)
    yield _loaded(residents, names)
    num_on_device = sum(adapter.tier == "device" for adapter in residents)
    yield sample("vllm:num_gpu_loaded_lora_adapters", num_on_device)
    yield sample("vllm:max_gpu_lora_adapters", max_loras)
    loads = family("vllm:lora_adapter_load_seconds")
    times = status.phases.get("load_seconds", {}).values()
    count = sum(sum(each.counts) for each in times)
    loads.add_metric([], count, sum(each.sum_seconds for each in times))
    yield loads


def _requests(status: EngineStatus) -> Iterator[Metric]:
    used, capacity = status.memory.get("kv_pages", (0, 0))
    yield sample("vllm:num_requests_running", status.num_running)
    yield sample("vllm:num_requests_waiting", status.num_waiting)
    yield sample("vllm:kv_cache_usage_perc", used / capacity if capacity else 0.0)


def _requests_info(
    status: EngineStatus, names: Names, max_loras: int, taken_time_s: float
) -> Metric:
    """Of several such series routers believe the one of the greatest value: one that does not
    answer must not stay the newest."""
    running = _joined_names(status.running_digests, names)
    waiting = _joined_names(status.waiting_digests, names)
    labels = (str(max_loras), running, waiting)
    return sample("vllm:lora_requests_info", taken_time_s, *labels)


def _loaded(residents: Sequence[ResidentAdapter], names: Names) -> Metric:
    loaded = family(LOADED)
    for adapter in residents:
        labels = (_LEVELS[adapter.tier], str(adapter.pinned).lower(), str(adapter.rank))
        for name in names.get(adapter.digest) or [adapter.digest]:
            if len(loaded.samples) >= MAX_LOADED_SERIES:
                break
            loaded.add_metric((name, *labels), 1.0)
    return loaded


def residency_series(loaded: Metric) -> Metric:
    """How many series of LOADED there are, for whoever does not keep them: names come and go
    without end."""
    levels = Counter(each.labels["level"] for each in loaded.samples)
    made = family("residency_series")
    for level in _LEVELS.values():
        made.add_metric([level], levels[level])
    return made


def _joined_names(digests: Sequence[str], names: Names) -> str:
    """The first name of each, then the second, and so on: an adapter of many names leaves none of
    the others without one."""
    ranks = zip_longest(*(names.get(digest) or [digest] for digest in digests))
    found = islice((name for rank in ranks for name in rank if name is not None), MAX_LISTED_NAMES)
    return ",".join(sorted(found))
