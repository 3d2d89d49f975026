"""Every metric of the inference service: docs/observability/metrics.md is made of it.

Keys are our own names without their prefix, and the whole name where it is others' to choose.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)

PREFIX = "loadout_inference_"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
    Kind.SUMMARY: SummaryMetricFamily,
}


@dataclass(frozen=True, slots=True)
class Definition:
    """`name` is without the suffix that its kind adds; Prometheus shows counters with `_total`."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


def _own(kind: Kind, name: str, meaning: str, *labels: str) -> Definition:
    return Definition(PREFIX + name, kind, meaning, labels)


def _foreign(kind: Kind, name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name, kind, meaning, labels)


_C, _G, _H, _S = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM, Kind.SUMMARY

REQUESTS = (
    _own(_C, "rpcs", "Calls by method and status code.", "method", "code"),
    _own(
        _C,
        "http_requests",
        "Requests to the HTTP front by route and status; 499: the client left first.",
        "route",
        "status",
    ),
    _own(
        _C,
        "rejections",
        "Calls that were refused or failed, by the error's reason; over HTTP the method is the "
        "route.",
        "method",
        "reason",
    ),
    _own(
        _C,
        "requests",
        "Generations that ended: stop, length, aborted (deadline), cancelled (the caller left), "
        "error.",
        "finish_reason",
    ),
    _own(_C, "prompt_tokens", "Tokens of prompts, counted when their request finishes."),
    _own(_C, "cached_prompt_tokens", "Of these, tokens that the prefix cache had."),
    _own(_C, "generated_tokens", "Tokens sent to callers, counted when their request ends."),
    _own(_C, "sampled_tokens", "Tokens as the engine makes them."),
    _own(
        _H,
        "queue_seconds",
        "From a request's arrival until it first ran; of one whose caller left before its first "
        "token, until then, though it may have begun to run.",
    ),
    _own(
        _H,
        "adapter_wait_seconds",
        "Of that, until its adapter was resident; of a request that gave up, until then.",
    ),
    _own(
        _H,
        "first_token_seconds",
        "From a request's arrival to its first token; of one that got none before its caller left "
        "or its deadline, until then: it would have been more.",
    ),
    _own(_H, "inter_token_seconds", "Between two tokens of a request, as the engine makes them."),
    _own(_H, "request_seconds", "From a request's arrival to its last token."),
    _own(
        _G,
        "snapshot_age_seconds",
        "How old what the engine has told is: about 0, and more when it does not answer. All that "
        "is not counted where calls end is as old, among it what gateways are told.",
    ),
    _own(_G, "requests_running", "Requests in the batch."),
    _own(_G, "requests_waiting", "Requests in the queue."),
    _own(_G, "requests_waiting_for_adapter", "Of these, requests whose adapter is not resident."),
    _own(_C, "preemptions", "Requests put back into the queue because pages ran out."),
)

_WHO = (
    "By adapter, tenant/name: the busiest have a series each (see `--metrics-adapters`), base is "
    "the base model, other all that have none, former what those had counted that lost theirs."
)

ADAPTERS = (
    _own(_C, "adapter_requests", f"Generations that ended. {_WHO}", "adapter"),
    _own(_C, "adapter_errors", "Of these, the ones that ended with an error.", "adapter"),
    _own(_C, "adapter_prompt_tokens", "Tokens of prompts.", "adapter"),
    _own(_C, "adapter_generated_tokens", "Tokens sent to callers.", "adapter"),
    _own(_S, "adapter_first_token_seconds", "From arrival to first token.", "adapter"),
    _own(_S, "adapter_load_wait_seconds", "Of that, until the adapter was resident.", "adapter"),
)

TIERS = (
    _own(_C, "tier_hits", "Requests that found their adapter in this tier.", "tier"),
    _own(_C, "tier_misses", "Requests that looked for it there in vain.", "tier"),
    _own(
        _C,
        "tier_evictions",
        "Adapters that left: for one that a request wants, for one that a request has waited for "
        "for long (aged), for one brought ahead (prefetch), or an operator said so (unload).",
        "tier",
        "reason",
    ),
    _own(
        _H,
        "tier_evicted_idle_seconds",
        "How long what was evicted had not been used. Short is thrash.",
        "tier",
    ),
    _own(_G, "tier_used_bytes", "Bytes that adapters take: device is the arena.", "tier"),
    _own(_G, "tier_capacity_bytes", "Bytes there are for adapters.", "tier"),
    _own(_G, "tier_pinned_bytes", "Bytes of pinned adapters, which never leave.", "tier"),
    _own(
        _G,
        "tier_largest_free_bytes",
        "Largest free range. Fragmentation is 1 - this / (capacity - used).",
        "tier",
    ),
    _own(_G, "tier_free_ranges", "Ranges that the free bytes lie in.", "tier"),
    _own(_G, "tier_images", "Adapters that have their room there.", "tier"),
    _own(
        _G,
        "residency_series",
        "Series of vllm:lora_adapter_loaded in this scrape, by level (gpu, cpu).",
        "level",
    ),
)

LOADS = (
    _own(
        _H,
        "load_seconds",
        "From wanting an adapter until requests could run with it, by where its bytes came from: "
        "host is the host tier, store a cold load.",
        "source",
    ),
    _own(
        _H,
        "load_phase_seconds",
        "What loads took: resolve (asking the store what a name points to), wait (for a turn and "
        "for room), pull (from the store), copy (from the host tier to the device).",
        "phase",
    ),
    _own(_G, "loads_in_progress", "Adapters on their way, by what comes next.", "state"),
    _own(_C, "pulls", "Adapters pulled, whole and verified."),
    _own(_C, "pull_failures", "Adapters that could not be pulled."),
    _own(
        _C,
        "corrupt_pulls",
        "Image streams whose bytes failed their hash; each is asked for once more.",
    ),
    _own(_C, "pulled_bytes", "Bytes of adapters pulled."),
    _own(_C, "prefetch_images", "Adapters brought before anybody asked."),
    _own(_C, "prefetch_bytes", "Bytes of these."),
    _own(_C, "prefetch_hits", "Of these adapters, the ones that a request then found."),
    _own(_C, "prefetch_wasted_bytes", "Bytes of the ones that left before one did."),
    _own(_G, "store_connected", "1 while the store's watch is live."),
    _own(
        _G,
        "store_replicas_healthy",
        "Replicas of the store that are asked: 1, or 0 while it is passed over.",
        "replica",
    ),
    _own(_C, "store_pulls", "Image streams from a replica that ended.", "replica", "result"),
    _own(_C, "store_pulled_bytes", "Bytes of images from a replica.", "replica"),
    _own(_C, "store_failovers", "Pulls and questions that went on at another replica."),
)

STEPS = (
    _own(_H, "step_seconds", "Steps, from their messages to their outputs."),
    _own(_H, "step_host_seconds", "Of a step, what is not the model's computation."),
    _own(_H, "step_blocked_by_load_seconds", "Of a step, what loads of adapters cost it."),
    _own(
        _H,
        "step_phase_seconds",
        "Parts of a step: schedule, prepare, forward, sample, settle. On CUDA forward launches, "
        "and sample waits for what was launched.",
        "phase",
    ),
    _own(_C, "lora_steps", "Steps in which an adapter took part."),
    _own(_G, "kv_pages_used", "Pages of keys and values that requests hold."),
    _own(_G, "kv_pages_known", "Pages, held or free, whose content a prefix may find."),
    _own(_G, "kv_pages_capacity", "Pages there are."),
    _own(_C, "kv_page_evictions", "Pages whose known content was given up for another."),
    _own(_G, "memory_used_bytes", "Memory in use.", "area"),
    _own(_G, "memory_capacity_bytes", "Memory there is.", "area"),
)

ABOUT = (
    _own(_G, "info", "1: what runs here.", "base_model", "dtype", "device"),
    _own(_G, "build_info", "1: what it is built of.", "version", "python", "torch"),
    _foreign(_C, "process_cpu_seconds", "CPU time of the process that listens."),
    _foreign(_G, "process_resident_memory_bytes", "Its resident memory."),
    _foreign(_G, "process_virtual_memory_bytes", "Its virtual memory."),
    _foreign(_G, "process_start_time_seconds", "When it started, unix time."),
    _foreign(_G, "process_open_fds", "Its open files."),
    _foreign(_G, "process_max_fds", "How many it may open."),
)

GATEWAYS = (
    _foreign(_G, "vllm:num_requests_running", "Requests in the batch."),
    _foreign(_G, "vllm:num_requests_waiting", "Requests in the queue."),
    _foreign(_G, "vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1."),
    _foreign(
        _G,
        "vllm:lora_requests_info",
        "Adapters with requests, separated by commas; the value is the unix time of the engine's "
        "answer.",
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    ),
    _foreign(
        _G,
        "vllm:lora_adapter_loaded",
        "1 for each name of each resident adapter, as callers write it: all on the device (gpu), "
        "and of those in host memory (cpu) the last used ones.",
        "adapter_name",
        "level",
        "pinned",
        "rank",
    ),
    _foreign(_G, "vllm:num_gpu_loaded_lora_adapters", "Adapters on the device."),
    _foreign(_G, "vllm:max_gpu_lora_adapters", "Most adapters on the device."),
    _foreign(_S, "vllm:lora_adapter_load_seconds", "From wanting an adapter to having it."),
)

SECTIONS = {
    "Requests": REQUESTS,
    "Requests by adapter": ADAPTERS,
    "Adapters in memory": TIERS,
    "Loads and the store": LOADS,
    "Steps and pages": STEPS,
    "What runs": ABOUT,
    "For gateways": GATEWAYS,
}

DEFINITIONS = {
    definition.name.removeprefix(PREFIX): definition
    for section in SECTIONS.values()
    for definition in section
}


def family(key: str) -> Any:
    """An empty family of prometheus_client for samples. Raises KeyError for what is not defined."""
    found = DEFINITIONS[key]
    return _FAMILIES[found.kind](found.name, found.meaning, labels=found.labels)


def sample(key: str, value: float, *label_values: str) -> Any:
    """A family of one sample."""
    made = family(key)
    made.add_metric(label_values, float(value))
    return made
