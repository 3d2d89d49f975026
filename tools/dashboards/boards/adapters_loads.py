"""Panels of adapters and caches: loads, and the store's replicas that send the images."""

from __future__ import annotations

from tools.dashboards import limits, links
from tools.dashboards.panels import Panel, Query, distribution, lines, percentiles
from tools.dashboards.queries import INFERENCE, REPLICA, WHICH


def loads() -> list[Panel]:
    return [*_load_times(), *_pulls()]


def _load_times() -> list[Panel]:
    return [
        percentiles(
            INFERENCE,
            "Load from the store",
            "From the first request for an adapter that was neither on the device nor in the host "
            "tier until it was resident.",
            "load_seconds",
            span=6,
            where='source="store"',
            limit=limits.LOAD,
        ),
        percentiles(
            INFERENCE,
            "Load from the host tier",
            "The same for adapters that only had to be copied to the device.",
            "load_seconds",
            span=6,
            where='source="host"',
        ),
        _phases("Phases of loads, p50", 0.5),
        _phases("Phases of loads, p99", 0.99),
        distribution(
            "Loads",
            "By duration. Two bands: from the host tier, and from the store.",
            "s",
            INFERENCE.buckets("load_seconds"),
        ),
    ]


def _pulls() -> list[Panel]:
    return [
        lines(
            "Loads in progress",
            "By the phase that they wait for: a pull thread (or the store does not know "
            "the layout yet), the pull, space to pull to, space on the device.",
            "short",
            Query(INFERENCE.sum("loads_in_progress", "state"), "{{state}}"),
            is_stacked=True,
        ),
        lines(
            "Pulls",
            "Adapters pulled and verified, adapters that could not be pulled, and streams whose "
            "bytes failed their hash: a bad network, memory or disk.",
            "cps",
            Query(INFERENCE.rate("pulls_total"), "pulled"),
            Query(INFERENCE.rate("pull_failures_total"), "failed"),
            Query(INFERENCE.rate("corrupt_pulls_total"), "corrupt"),
            links=[links.TO_STORE],
        ),
        lines(
            "Bytes pulled",
            "From the store, by replica of the inference service.",
            "binBps",
            Query(INFERENCE.rate("pulled_bytes_total", REPLICA), WHICH),
            span=12,
            is_stacked=True,
            links=[links.TO_STORE],
        ),
        lines(
            "Steps blocked by loads",
            "Share of step time spent on loads. Above a few percent, loads delay requests for "
            "other adapters.",
            "percentunit",
            Query(
                f"{INFERENCE.rate('step_blocked_by_load_seconds_sum', REPLICA)} / "
                f"{INFERENCE.rate('step_seconds_sum', REPLICA)}",
                WHICH,
            ),
            span=12,
        ),
    ]


def prefetch() -> list[Panel]:
    return [
        lines(
            "Prefetched adapters",
            "Adapters loaded before any request needed them, and how many of them a "
            "request then used.",
            "cps",
            Query(INFERENCE.rate("prefetch_images_total"), "prefetched"),
            Query(INFERENCE.rate("prefetch_hits_total"), "used"),
            span=12,
        ),
        lines(
            "Prefetched bytes",
            "Bytes of prefetched adapters, and of those evicted unused. Mostly wasted: "
            "the prediction is bad, or there is no space for prefetching.",
            "binBps",
            Query(INFERENCE.rate("prefetch_bytes_total"), "prefetched"),
            Query(INFERENCE.rate("prefetch_wasted_bytes_total"), "wasted"),
            span=12,
        ),
    ]


def replicas() -> list[Panel]:
    return [
        lines(
            "Connected",
            "1 while a replica's watch on the store is live. At 0 it gets no new names.",
            "short",
            Query(INFERENCE.series("store_connected"), WHICH),
            maximum=1,
        ),
        lines(
            "Healthy replicas",
            "For each replica of the store, the number of inference replicas that use it; the "
            "others skip it as unhealthy.",
            "short",
            Query(INFERENCE.sum("store_replicas_healthy", "replica"), "{{replica}}"),
        ),
        lines(
            "Failovers",
            "Pulls and lookups that continued at another replica of the store.",
            "cps",
            Query(INFERENCE.rate("store_failovers_total", REPLICA), WHICH),
        ),
        lines(
            "Streams from the store",
            "Image streams that ended, by replica and result. For results other than done "
            "and cancelled, see that replica's log.",
            "cps",
            Query(INFERENCE.rate("store_pulls_total", "replica, result"), "{{replica}} {{result}}"),
            span=12,
            is_stacked=True,
            links=[links.TO_STORE],
        ),
        lines(
            "Bytes from the store",
            "By replica. Each digest is pulled from one of them, so they should be about equal.",
            "binBps",
            Query(INFERENCE.rate("store_pulled_bytes_total", "replica"), "{{replica}}"),
            span=12,
            is_stacked=True,
            links=[links.TO_STORE],
        ),
    ]


def _phases(title: str, q: float) -> Panel:
    return lines(
        title,
        "resolve: name to digest, in the store; wait: for a pull thread and for space; pull: "
        "from the store; copy: from the host tier to the device.",
        "s",
        Query(INFERENCE.quantile(q, "load_phase_seconds", "phase"), "{{phase}}"),
        span=6,
        links=[links.TO_STORE],
    )
