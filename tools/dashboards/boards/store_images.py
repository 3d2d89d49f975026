"""Panels of the adapter store: pulls, images, the tiers, the catalog, and the replicas."""

from __future__ import annotations

from tools.dashboards import limits, links
from tools.dashboards.panels import Column, Panel, Query, distribution, lines, percentiles, rows_by
from tools.dashboards.queries import CATALOG, REPLICA, SAME_TARGET, STORE, WHICH, share

_FREE = "instance:loadout_store_volume_free:ratio"
_BUILT_OF = ("version", "python", "compiler")
_WHOSE = "in all {{namespace}} {{cluster}}"


def pulls() -> list[Panel]:
    return [
        lines(
            "Pulls",
            "By result: complete, cancelled, or the error's reason.",
            "cps",
            Query(STORE.rate("pulls_total", "result"), "{{result}}"),
            span=6,
            is_stacked=True,
            links=[links.TO_LOADS],
        ),
        percentiles(
            STORE,
            "Wait of pulls",
            "From the call to the first bytes: lookup, compile, a free worker, space in memory.",
            "pull_wait_seconds",
            span=6,
        ),
        lines(
            "Bytes sent",
            "Of images. At the network's limit, add replicas or stores on the nodes.",
            "binBps",
            Query(STORE.rate("pulled_bytes_total", REPLICA), WHICH),
            span=6,
            is_stacked=True,
        ),
        lines(
            "Streams in progress",
            "Pulls, and the watches of inference replicas: one for each, spread over the stores.",
            "short",
            Query(STORE.sum("active_pulls", REPLICA), f"{WHICH} pulls"),
            Query(STORE.sum("active_watches", REPLICA), f"{WHICH} watches"),
            span=6,
        ),
    ]


def images() -> list[Panel]:
    return [
        lines(
            "Compiles",
            "Images compiled. incompatible is an adapter that does not fit a base model's layout; "
            "failed is ours.",
            "cps",
            Query(STORE.rate("compiles_total", "result"), "{{result}}"),
            span=6,
            is_stacked=True,
        ),
        percentiles(
            STORE,
            "Compile",
            "One image. Grows with the adapter's bytes, and when workers lack cores.",
            "compile_seconds",
            span=6,
        ),
        distribution(
            "Compiles by time",
            "All images compiled.",
            "s",
            STORE.buckets("compile_seconds"),
            span=6,
        ),
        lines(
            "Images in progress",
            "Images being compiled or written, or waiting for that, and images that wait "
            "for space.",
            "short",
            Query(STORE.sum("images_in_progress"), "in progress"),
            Query(STORE.sum("images_waiting_for_room"), "waiting for room"),
            span=6,
        ),
    ]


def tiers() -> list[Panel]:
    used, capacity = STORE.sum("tier_used_bytes", "tier"), "tier_capacity_bytes"
    hits = STORE.rate("tier_hits_total", "tier")
    return [
        lines(
            "Share of hits",
            "By tier: memory, then disk, then the shared bucket. Images in no tier are compiled.",
            "percentunit",
            Query(share(hits, STORE.rate("tier_misses_total", "tier")), "{{tier}}"),
            maximum=1,
        ),
        lines(
            "Lookups",
            "Images looked up in a tier.",
            "cps",
            Query(hits, "{{tier}} hits"),
            Query(STORE.rate("tier_misses_total", "tier"), "{{tier}} misses"),
        ),
        lines(
            "Evictions",
            "By reason: room (for another image), deleted (with their adapter), unused (their "
            "layout is no longer used), damaged.",
            "cps",
            Query(STORE.rate("tier_evictions_total", "tier, reason"), "{{tier}}: {{reason}}"),
            is_stacked=True,
        ),
        lines(
            "Bytes",
            "Used by images, and capacity, in all replicas.",
            "bytes",
            Query(used, "{{tier}} used"),
            Query(STORE.sum(capacity, "tier"), "{{tier}} capacity"),
        ),
        lines(
            "Share used",
            "A full tier is normal while evictions are few.",
            "percentunit",
            Query(f"{used} / ({STORE.sum(capacity, 'tier')} > 0)", "{{tier}}"),
            maximum=1,
        ),
        lines(
            "Images",
            "In each tier, in all replicas.",
            "short",
            Query(STORE.sum("tier_images", "tier"), "{{tier}}"),
        ),
    ]


def catalog() -> list[Panel]:
    return [
        lines(
            "Revision",
            "Newest catalog revision of each replica. They share one catalog: a replica "
            "that stays behind does not see the others' changes.",
            "short",
            Query(STORE.series("revision"), WHICH),
            span=6,
        ),
        lines(
            "Adapters",
            "Names in the catalog.",
            "short",
            Query(_of_each_catalog("adapters"), _WHOSE),
            span=6,
        ),
        lines(
            "Layouts",
            "Base models' layouts in use: each adapter of a base is compiled for all of them.",
            "short",
            Query(_of_each_catalog("layouts"), _WHOSE),
            span=6,
        ),
        lines(
            "Stored sources",
            "Bytes of blobs. They only shrink when adapters are deleted.",
            "bytes",
            Query(_of_each_catalog("blob_bytes"), _WHOSE),
            span=6,
        ),
        lines(
            "Free share of the volume",
            "Of the data folder's file system. Without free space nothing can be registered.",
            "percentunit",
            Query(STORE.series(_FREE), WHICH),
            span=12,
            limit=limits.FREE_VOLUME,
            maximum=1,
        ),
        lines(
            "Volume",
            "Free bytes, and capacity.",
            "bytes",
            Query(STORE.series("volume_free_bytes"), f"{WHICH} free"),
            Query(STORE.series("volume_capacity_bytes"), f"{WHICH} all"),
            span=12,
        ),
    ]


def replicas() -> list[Panel]:
    built_of = ", ".join(_BUILT_OF)
    return [
        rows_by(
            "Store replicas",
            "Versions by replica. No version: the replica does not answer.",
            ["instance", "namespace", "cluster", *_BUILT_OF],
            [
                Column("Up", f"sum by ({REPLICA}) ({STORE.up})", "short"),
                Column(
                    "Uptime",
                    f"sum by ({REPLICA}, {built_of}) "
                    f"((time() - {STORE.series('process_start_time_seconds')}) "
                    f"* {SAME_TARGET} group_left ({built_of}) {STORE.series('build_info')})",
                    "s",
                ),
                Column("Watches", STORE.sum("active_watches", REPLICA), "short"),
                Column(
                    "Open files",
                    f"{STORE.sum('process_open_fds', REPLICA)} / "
                    f"{STORE.sum('process_max_fds', REPLICA)}",
                    "percentunit",
                ),
            ],
            span=12,
        ),
        lines(
            "Resident memory",
            "Of the process. More than the memory tier: compiles and streams.",
            "bytes",
            Query(STORE.series("process_resident_memory_bytes"), WHICH),
            span=6,
        ),
        lines(
            "CPU",
            "Cores in use: compiling and hashing.",
            "short",
            Query(STORE.rate("process_cpu_seconds_total", REPLICA), WHICH),
            span=6,
        ),
    ]


def _of_each_catalog(metric: str) -> str:
    """Returns a metric once for each catalog, because all replicas of a catalog report the same."""
    return f"max by ({CATALOG}) ({STORE.series(metric)})"
