"""Every metric of the adapter store: docs/observability/metrics.md is made of it.

Keys are our own names without their prefix, and the whole name where it is others' to choose.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

PREFIX = "loadout_store_"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
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


def _foreign(kind: Kind, name: str, meaning: str) -> Definition:
    return Definition(name, kind, meaning)


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

CALLS = (
    _own(_C, "requests", "Calls answered, by method and status code.", "method", "code"),
    _own(_H, "request_seconds", "Duration of calls; streams until their end.", "method"),
    _own(
        _C,
        "rejections",
        "Calls that were refused or failed, by the error's reason.",
        "method",
        "reason",
    ),
    _own(
        _C,
        "registrations",
        "Registrations and uploads, by result: ok, or the reason of the error.",
        "result",
    ),
    _own(_H, "registration_seconds", "From the call to the durable record."),
    _own(_C, "fetched_bytes", "Bytes taken from sources and uploads."),
    _own(_C, "pulls", "Pulls by result: complete, cancelled, or the error's reason.", "result"),
    _own(
        _H,
        "pull_wait_seconds",
        "From the call to a pull's first answer: looking up, a turn, and room in memory.",
    ),
    _own(_C, "pulled_bytes", "Image bytes sent."),
    _own(_G, "active_pulls", "Pulls in progress."),
    _own(_G, "active_watches", "Watches in progress."),
)

IMAGES = (
    _own(_C, "compiles", "Images compiled, by result: ready, incompatible, failed.", "result"),
    _own(_H, "compile_seconds", "Compiling one image."),
    _own(_G, "images_in_progress", "Images being made or written, or waiting for it."),
    _own(_G, "images_waiting_for_room", "Of these, the ones that wait for room in memory."),
    _own(_C, "damaged_files", "Own files that failed their hash, by kind: image or blob.", "kind"),
    _own(_C, "tier_hits", "Images looked for and found: memory, disk, shared.", "tier"),
    _own(_C, "tier_misses", "Images looked for and not found.", "tier"),
    _own(
        _C,
        "tier_evictions",
        "Images that left: for room, because their adapter was deleted, because nobody uses their "
        "layout any more (unused), or damaged.",
        "tier",
        "reason",
    ),
    _own(_G, "tier_used_bytes", "Bytes that images take.", "tier"),
    _own(_G, "tier_capacity_bytes", "Bytes there are for images.", "tier"),
    _own(_G, "tier_images", "Images there.", "tier"),
    _own(_G, "volume_free_bytes", "Free bytes of the file system that the data folder is on."),
    _own(_G, "volume_capacity_bytes", "Its bytes in all."),
)

CATALOG = (
    _own(_G, "revision", "Newest catalog revision."),
    _own(_G, "adapters", "Names in the catalog."),
    _own(_G, "layouts", "Layouts that are in use."),
    _own(_G, "blob_bytes", "Size of the kept sources."),
)

ABOUT = (
    _own(_G, "build_info", "1: what it is built of.", "version", "python", "compiler"),
    _foreign(_C, "process_cpu_seconds", "CPU time of the process."),
    _foreign(_G, "process_resident_memory_bytes", "Its resident memory."),
    _foreign(_G, "process_virtual_memory_bytes", "Its virtual memory."),
    _foreign(_G, "process_start_time_seconds", "When it started, unix time."),
    _foreign(_G, "process_open_fds", "Its open files."),
    _foreign(_G, "process_max_fds", "How many it may open."),
)

SECTIONS = {
    "Calls": CALLS,
    "Images": IMAGES,
    "Catalog": CATALOG,
    "What runs": ABOUT,
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
