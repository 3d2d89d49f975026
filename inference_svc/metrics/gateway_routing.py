"""The metrics by which gateways route (`vllm:*`), whose names and labels are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest

from prometheus_client.core import Metric

from inference_svc.engine.control.status_types import EngineStatus, ResidentAdapter
from inference_svc.metrics.definitions import DEFINITIONS

LOADED = "vllm:lora_adapter_loaded"
MAX_LOADED_SERIES = 2000
"""Names of resident adapters shown, the most recently used first."""
MAX_LISTED_NAMES = 512
"""Names in one label."""

LEVELS = {"device": "gpu", "host": "cpu"}
"""The gateways' names of our tiers."""

Names = Mapping[str, Sequence[str]]
"""The names that point to a digest; without any, the digest is shown."""


def gateway_metrics(
    status: EngineStatus,
    residents: Sequence[ResidentAdapter],
    names: Names,
    *,
    max_loras: int,
    taken_time_s: float,
) -> Iterator[Metric]:
    """Yields the gateways' families. `residents` are all adapters on the device and the ones of the
    host tier to be shown; everything is as of `taken_time_s`, a unix time."""
    yield from _requests(status)
    yield _requests_info(status, names, max_loras, taken_time_s)
    yield _loaded(residents, names)
    num_on_device = sum(adapter.tier == "device" for adapter in residents)
    yield DEFINITIONS.sample("vllm:num_gpu_loaded_lora_adapters", num_on_device)
    yield DEFINITIONS.sample("vllm:max_gpu_lora_adapters", max_loras)
    loads = DEFINITIONS.family("vllm:lora_adapter_load_seconds")
    times = status.phases.get("load_seconds", {}).values()
    count = sum(sum(each.counts) for each in times)
    loads.add_metric([], count, sum(each.sum_seconds for each in times))
    yield loads


def _requests(status: EngineStatus) -> Iterator[Metric]:
    used, capacity = status.memory.get("kv_pages", (0, 0))
    yield DEFINITIONS.sample("vllm:num_requests_running", status.num_running)
    yield DEFINITIONS.sample("vllm:num_requests_waiting", status.num_waiting)
    yield DEFINITIONS.sample("vllm:kv_cache_usage_perc", used / capacity if capacity else 0.0)


def _requests_info(
    status: EngineStatus, names: Names, max_loras: int, taken_time_s: float
) -> Metric:
    """Returns the adapters with requests. Routers use the series with the greatest value: an engine
    that does not answer must not keep the newest."""
    running = _joined_names(status.running_digests, names)
    waiting = _joined_names(status.waiting_digests, names)
    labels = (str(max_loras), running, waiting)
    return DEFINITIONS.sample("vllm:lora_requests_info", taken_time_s, *labels)


def _loaded(residents: Sequence[ResidentAdapter], names: Names) -> Metric:
    loaded = DEFINITIONS.family(LOADED)
    for adapter in residents:
        labels = (LEVELS[adapter.tier], str(adapter.pinned).lower(), str(adapter.rank))
        for name in names.get(adapter.digest) or [adapter.digest]:
            if len(loaded.samples) >= MAX_LOADED_SERIES:
                break
            loaded.add_metric((name, *labels), 1.0)
    return loaded


def residency_series(loaded: Metric) -> Metric:
    """Counts the series of LOADED, for scrapers that drop them: their names change all the time."""
    levels = Counter(each.labels["level"] for each in loaded.samples)
    values = {(level,): float(levels[level]) for level in LEVELS.values()}
    return DEFINITIONS.samples("residency_series", values)


def _joined_names(digests: Sequence[str], names: Names) -> str:
    """Joins the first name of each digest, then the second, and so on, so that an adapter with many
    names does not crowd out the others."""
    ranks = zip_longest(*(names.get(digest) or [digest] for digest in digests))
    found = islice((name for rank in ranks for name in rank if name is not None), MAX_LISTED_NAMES)
    return ",".join(sorted(found))
