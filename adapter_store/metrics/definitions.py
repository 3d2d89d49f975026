"""Defines every metric of the adapter store; docs/observability/metrics.md is generated from it."""

from __future__ import annotations

from servicekit.telemetry.metrics import PROCESS, Definitions, Namespace, define_reloads
from servicekit.telemetry.place_metrics import define_places

PREFIX = "loadout_store_"
_OWN = Namespace(PREFIX)

_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Buckets of times as long as a large adapter's way here."""

CALLS = (
    _OWN.counter("requests", "Calls answered, by method and status code.", "method", "code"),
    _OWN.histogram(
        "request_seconds",
        "Duration of calls; of streams, until their end.",
        "method",
        bounds_s=_BOUNDS_S,
    ),
    _OWN.counter(
        "rejections",
        "Calls that were refused or failed, by the error's reason.",
        "method",
        "reason",
    ),
    _OWN.counter(
        "registrations",
        "Registrations and uploads, by result: ok, or the error's reason.",
        "result",
    ),
    _OWN.histogram(
        "registration_seconds",
        "Time from a registration's call until its record was durable.",
        bounds_s=_BOUNDS_S,
    ),
    _OWN.counter("fetched_bytes", "Bytes fetched from sources and received as uploads."),
    _OWN.counter("pulls", "Pulls by result: complete, cancelled, or the error's reason.", "result"),
    _OWN.histogram(
        "pull_wait_seconds",
        "Time from a pull's call to its first answer: lookup, a free worker, space in memory, and, "
        "with --share-socket, the building of a small image, for at most a second.",
        bounds_s=_BOUNDS_S,
    ),
    _OWN.counter("pulled_bytes", "Image bytes sent."),
    _OWN.counter(
        "shared_pulls",
        "Pulls of a store with --share-socket, by how their bytes went: shared, as a file that the "
        "receiver maps; else they were streamed, because they are not_asked to be shared, or the "
        "receiver knows another process (other_store), resumes an image (resumed), or the image is "
        "building, in_use, small, has no_file, or the account has too_many.",
        "result",
    ),
    _OWN.gauge("active_pulls", "Pulls in progress."),
    _OWN.gauge("active_watches", "Watches in progress."),
)

IMAGES = (
    _OWN.counter("compiles", "Images compiled, by result: ready, incompatible, failed.", "result"),
    _OWN.histogram("compile_seconds", "Time to compile one image.", bounds_s=_BOUNDS_S),
    _OWN.gauge(
        "images_in_progress", "Images being compiled, read or written, or waiting for a worker."
    ),
    _OWN.gauge("images_waiting_for_room", "Images in progress that wait for space in memory."),
    _OWN.counter(
        "damaged_files", "Stored files that failed their hash, by kind: image or blob.", "kind"
    ),
    _OWN.counter(
        "tier_hits",
        "Image lookups that found the image in this tier: memory, disk, shared.",
        "tier",
    ),
    _OWN.counter("tier_misses", "Image lookups that did not find the image in this tier.", "tier"),
    _OWN.counter(
        "tier_evictions",
        "Images removed, by reason: room (for another image), deleted (with their adapter), "
        "unused (their layout is no longer used), or damaged.",
        "tier",
        "reason",
    ),
    _OWN.gauge(
        "memory_locked",
        "1 if the memory of images is locked, so that it is never swapped out; 0 if the system "
        "does not allow it. Absent with --lock-images off.",
    ),
    _OWN.gauge("swap_bytes", "Swap space of the machine. Locked memory is never written there."),
    _OWN.gauge("tier_used_bytes", "Bytes used by images.", "tier"),
    _OWN.gauge("tier_capacity_bytes", "Bytes available for images.", "tier"),
    _OWN.gauge("tier_images", "Number of images.", "tier"),
    _OWN.gauge("volume_free_bytes", "Free bytes of the data folder's file system."),
    _OWN.gauge("volume_capacity_bytes", "Total bytes of the data folder's file system."),
    _OWN.gauge(
        "volume_full",
        "1 while that file system is full: registrations are refused, deletions work.",
    ),
)

PLACES = define_places(_OWN)

CATALOG = (
    _OWN.gauge("revision", "Newest catalog revision."),
    _OWN.gauge("adapters", "Number of names in the catalog."),
    _OWN.gauge("layouts", "Number of layouts in use."),
    _OWN.gauge("blob_bytes", "Total size of the stored sources."),
)

ABOUT = (
    _OWN.gauge(
        "build_info",
        "Always 1; the labels are the software's versions.",
        "version",
        "python",
        "compiler",
    ),
    define_reloads(_OWN),
    *PROCESS,
)

SECTIONS = {
    "Calls": CALLS,
    "Images": IMAGES,
    "Places": PLACES,
    "Catalog": CATALOG,
    "Process": ABOUT,
}

DEFINITIONS = Definitions(PREFIX, SECTIONS)
