"""Adapters and caches: which are busy, do they fit, and what do loads wait for?"""

from __future__ import annotations

from tools.dashboards import limits, links, variables
from tools.dashboards.board import Board, Row
from tools.dashboards.links import Link
from tools.dashboards.panels import (
    Column,
    Panel,
    Query,
    distribution,
    lines,
    number,
    percentiles,
    rows_by,
)
from tools.dashboards.queries import INFERENCE, or_zero, share

TO_STORE = Link("The store at that time", links.STORE)
TO_ADAPTER = Link("Only this adapter", links.ADAPTERS, {"adapter": "${__field.labels.adapter}"})
_CHOSEN = f'adapter=~"$adapter",adapter!="{variables.NOT_ADAPTERS}"'
_DEVICE = 'tier="device"'
_TOP = 10
_WHERE = "{{instance}} {{tier}}"


def build() -> Board:
    return Board(
        links.ADAPTERS,
        "Which adapters are busy, whether they fit into the tiers, and what their loads wait for.",
        services=[INFERENCE],
        variables=[variables.adapter()],
        rows=[
            Row("Now", _now()),
            Row("Busiest adapters", _busiest()),
            Row("Tiers: hits", _lookups()),
            Row("Tiers: evictions", _evictions()),
            Row("Tiers: bytes", _bytes()),
            Row("Loads", _loads()),
            Row("Prefetch", _prefetch()),
            Row("The store's replicas, seen from here", _replicas()),
        ],
    )


def _now() -> list[Panel]:
    return [
        number(
            "Found on the device",
            "Share of the requests for an adapter that find it resident.",
            "percentunit",
            share(_hits(_DEVICE), _misses(_DEVICE)),
        ),
        number(
            "Load, p99",
            "From wanting an adapter until requests could run with it.",
            "s",
            INFERENCE.quantile(0.99, "load_seconds"),
            limit=limits.LOAD,
        ),
        number(
            "Waiting for an adapter",
            "Requests whose adapter is not resident.",
            "short",
            INFERENCE.sum("requests_waiting_for_adapter"),
        ),
        number(
            "On their way",
            "Adapters that are being loaded, or wait for it.",
            "short",
            INFERENCE.sum("loads_in_progress"),
        ),
        number(
            "Evictions",
            "Adapters that leave the device per second.",
            "cps",
            INFERENCE.rate("tier_evictions_total", where=_DEVICE),
        ),
        number(
            "Thrash",
            "For each request with an adapter, adapters evicted that were used within the last "
            "minute: of the worst replica and tier.",
            "percentunit",
            f"max({_thrash()})",
            limit=limits.THRASH,
        ),
        number(
            "Failed pulls",
            "In the chosen time. The reasons are under the store's replicas, and in the logs.",
            "short",
            INFERENCE.growth("pull_failures_total", window="$__range"),
            limit=limits.ANY,
            links=[TO_STORE],
        ),
        number(
            "Without the store",
            "Replicas whose watch of the store is down. They serve what is resident, and names "
            "that they know, for a while.",
            "short",
            or_zero(f"count({INFERENCE.series('store_connected')} == 0)"),
            limit=limits.ANY,
            links=[TO_STORE],
        ),
    ]


def _busiest() -> list[Panel]:
    return [
        rows_by(
            "Adapters with a series of their own",
            "Means over the chosen time. base is the base model, other all adapters that are less "
            "busy than --metrics-adapters allows for.",
            ["adapter"],
            [
                Column("Requests", _per_adapter("requests_total"), "reqps"),
                Column("Generated", _per_adapter("generated_tokens_total"), "si:tok/s"),
                Column("Prompts", _per_adapter("prompt_tokens_total"), "si:tok/s"),
                Column("Errors", _per_adapter("errors_total"), "reqps"),
                Column("First token", _mean_per_adapter("first_token_seconds"), "s"),
                Column("Wait for load", _mean_per_adapter("load_wait_seconds"), "s"),
            ],
            height=10,
            link=Link(TO_ADAPTER.title, links.ADAPTERS, {"adapter": "${__data.fields.adapter}"}),
        ),
        _top(
            "Requests by adapter",
            "The busiest at each moment.",
            "reqps",
            INFERENCE.rate("adapter_requests_total", "adapter", _CHOSEN),
        ),
        _top(
            "Errors by adapter",
            "Requests that ended with an error. One adapter alone: its image, or its store entry; "
            "all of them: the replicas.",
            "reqps",
            INFERENCE.rate("adapter_errors_total", "adapter", _CHOSEN),
        ),
        _top(
            "First token by adapter",
            "Mean. The slowest at each moment.",
            "s",
            INFERENCE.mean("adapter_first_token_seconds", "adapter", _CHOSEN),
        ),
        _top(
            "Wait for a load by adapter",
            "Mean. Adapters that wait often are wanted often enough to be evicted, and too seldom "
            "to stay: pin them, or give the arena more memory.",
            "s",
            INFERENCE.mean("adapter_load_wait_seconds", "adapter", _CHOSEN),
        ),
    ]


def _lookups() -> list[Panel]:
    hits = INFERENCE.rate("tier_hits_total", "tier")
    return [
        lines(
            "Share of hits",
            "By tier. Whoever finds an adapter on the device does not look in the host tier.",
            "percentunit",
            Query(share(hits, INFERENCE.rate("tier_misses_total", "tier")), "{{tier}}"),
            maximum=1,
        ),
        lines(
            "Look-ups",
            "Requests that found their adapter in a tier, and that did not.",
            "reqps",
            Query(hits, "{{tier}} hits"),
            Query(INFERENCE.rate("tier_misses_total", "tier"), "{{tier}} misses"),
        ),
        lines(
            "Share of hits by replica",
            "On the device. Replicas far apart: requests are not routed by adapter.",
            "percentunit",
            Query(share(_hits(_DEVICE, "instance"), _misses(_DEVICE, "instance")), "{{instance}}"),
            maximum=1,
        ),
    ]


def _evictions() -> list[Panel]:
    return [
        lines(
            "Thrash",
            "For each request with an adapter, adapters evicted that were used within the last "
            "minute. Working sets do not fit: more memory, more replicas, or routing by adapter.",
            "percentunit",
            Query(_thrash(), _WHERE),
            span=6,
            limit=limits.THRASH,
        ),
        lines(
            "Evictions",
            "For one that a request wants, for one that a request has waited for for long (aged), "
            "for one brought ahead (prefetch), or said by an operator (unload).",
            "cps",
            Query(INFERENCE.rate("tier_evictions_total", "tier, reason"), "{{tier}}: {{reason}}"),
            span=6,
            is_stacked=True,
        ),
        lines(
            "Idle before eviction",
            "How long what left had not been used: the tenth and the half of evictions. Short is "
            "thrash.",
            "s",
            *(
                Query(
                    INFERENCE.quantile(q, "tier_evicted_idle_seconds", "tier"),
                    f"{{{{tier}}}} p{q * 100:.0f}",
                )
                for q in (0.1, 0.5)
            ),
            span=6,
        ),
        distribution(
            "Evictions by idle time",
            "Of all tiers. Dark at the bottom: adapters leave that were just in use.",
            "s",
            INFERENCE.buckets("tier_evicted_idle_seconds"),
            span=6,
        ),
    ]


def _bytes() -> list[Panel]:
    used, capacity = INFERENCE.sum("tier_used_bytes", "tier"), "tier_capacity_bytes"
    free = f"({INFERENCE.series(capacity)} - {INFERENCE.series('tier_used_bytes')} > 0)"
    return [
        lines(
            "Bytes",
            "That adapters take, that pinned ones of them take, and that there are, in all "
            "replicas. A full tier is as it should be; a tier full of pinned ones is not.",
            "bytes",
            Query(used, "{{tier}} used"),
            Query(INFERENCE.sum("tier_pinned_bytes", "tier"), "{{tier}} pinned"),
            Query(INFERENCE.sum(capacity, "tier"), "{{tier}} capacity"),
        ),
        lines(
            "Adapters",
            "That have their room in each tier, in all replicas.",
            "short",
            Query(INFERENCE.sum("tier_images", "tier"), "{{tier}}"),
        ),
        lines(
            "Share pinned",
            "Of each tier's bytes. What is pinned never leaves, and the others share the rest.",
            "percentunit",
            Query(INFERENCE.series("instance_tier:loadout_inference_tier_pinned:ratio"), _WHERE),
            limit=limits.PINNED,
            maximum=1,
        ),
        lines(
            "Fragmentation",
            "Of the free bytes, the share beyond the largest free range. High beside many "
            "evictions: adapters are laid in several extents, or evict more than their size.",
            "percentunit",
            Query(f"1 - {INFERENCE.series('tier_largest_free_bytes')} / {free}", _WHERE),
            span=12,
            maximum=1,
        ),
        lines(
            "Free ranges",
            "That the free bytes lie in.",
            "short",
            Query(INFERENCE.series("tier_free_ranges"), _WHERE),
            span=12,
        ),
    ]


def _loads() -> list[Panel]:
    return [
        percentiles(
            INFERENCE,
            "Load",
            "From wanting an adapter until requests could run with it.",
            "load_seconds",
            limit=limits.LOAD,
        ),
        _phases("Phases of loads, p50", 0.5),
        _phases("Phases of loads, p99", 0.99),
        distribution(
            "Loads",
            "By how long they took. Two bands: from the host tier, and from the store.",
            "s",
            INFERENCE.buckets("load_seconds"),
        ),
        lines(
            "On their way",
            "By what comes next: a turn (others are pulled first, or the store does not know the "
            "layout yet), the pull, room to pull to, room on the device.",
            "short",
            Query(INFERENCE.sum("loads_in_progress", "state"), "{{state}}"),
            is_stacked=True,
        ),
        lines(
            "Pulls",
            "Adapters pulled whole and verified, those that could not be, and streams whose bytes "
            "failed their hash: a bad network, memory or disk.",
            "cps",
            Query(INFERENCE.rate("pulls_total"), "pulled"),
            Query(INFERENCE.rate("pull_failures_total"), "failed"),
            Query(INFERENCE.rate("corrupt_pulls_total"), "corrupt"),
            links=[TO_STORE],
        ),
        lines(
            "Bytes pulled",
            "From the store, by replica of the inference service.",
            "binBps",
            Query(INFERENCE.rate("pulled_bytes_total", "instance"), "{{instance}}"),
            span=12,
            is_stacked=True,
            links=[TO_STORE],
        ),
        lines(
            "Steps blocked by loads",
            "Share of the time of steps that loads cost them. Over a few percent: loads disturb "
            "requests that have nothing to do with them.",
            "percentunit",
            Query(
                f"{INFERENCE.rate('step_blocked_by_load_seconds_sum', 'instance')} / "
                f"{INFERENCE.rate('step_seconds_sum', 'instance')}",
                "{{instance}}",
            ),
            span=12,
        ),
    ]


def _prefetch() -> list[Panel]:
    return [
        lines(
            "Adapters brought ahead",
            "Before anybody asked, and those of them that a request then found.",
            "cps",
            Query(INFERENCE.rate("prefetch_images_total"), "brought"),
            Query(INFERENCE.rate("prefetch_hits_total"), "found"),
            span=12,
        ),
        lines(
            "Bytes brought ahead",
            "And those that left before a request found them. Mostly wasted: the choice is bad, or "
            "there is no room to choose for.",
            "binBps",
            Query(INFERENCE.rate("prefetch_bytes_total"), "brought"),
            Query(INFERENCE.rate("prefetch_wasted_bytes_total"), "wasted"),
            span=12,
        ),
    ]


def _replicas() -> list[Panel]:
    return [
        lines(
            "Connected",
            "1 while a replica's watch of the store is live. At 0 it learns of no new names.",
            "short",
            Query(INFERENCE.series("store_connected"), "{{instance}}"),
            maximum=1,
        ),
        lines(
            "Replicas asked",
            "How many of the inference replicas ask a replica of the store; others pass it over.",
            "short",
            Query(INFERENCE.sum("store_replicas_healthy", "replica"), "{{replica}}"),
        ),
        lines(
            "Failovers",
            "Pulls and questions that went on at another replica of the store.",
            "cps",
            Query(INFERENCE.rate("store_failovers_total", "instance"), "{{instance}}"),
        ),
        lines(
            "Streams from the store",
            "Image streams that ended, by replica and result. Whatever is neither complete nor "
            "cancelled is worth a look at that replica's log.",
            "cps",
            Query(INFERENCE.rate("store_pulls_total", "replica, result"), "{{replica}} {{result}}"),
            span=12,
            is_stacked=True,
            links=[TO_STORE],
        ),
        lines(
            "Bytes from the store",
            "By replica. Each digest is pulled from one of them, so that they should be even.",
            "binBps",
            Query(INFERENCE.rate("store_pulled_bytes_total", "replica"), "{{replica}}"),
            span=12,
            is_stacked=True,
            links=[TO_STORE],
        ),
    ]


def _thrash() -> str:
    """What the alert compares, by replica and tier."""
    evicted = INFERENCE.series("instance_tier:loadout_inference_tier_thrash:rate5m")
    asked = INFERENCE.series("instance:loadout_inference_adapter_lookups:rate5m")
    return f"{evicted} / ignoring (tier) group_left ({asked} > 0)"


def _hits(where: str, by: str = "") -> str:
    return INFERENCE.rate("tier_hits_total", by, where)


def _misses(where: str, by: str = "") -> str:
    return INFERENCE.rate("tier_misses_total", by, where)


def _top(title: str, description: str, unit: str, expression: str) -> Panel:
    query = Query(f"topk({_TOP}, {expression})", "{{adapter}}")
    return lines(title, description, unit, query, span=6, links=[TO_ADAPTER])


def _per_adapter(metric: str) -> str:
    return INFERENCE.rate(f"adapter_{metric}", "adapter", _CHOSEN, "$__range")


def _mean_per_adapter(metric: str) -> str:
    return INFERENCE.mean(f"adapter_{metric}", "adapter", _CHOSEN, "$__range")


def _phases(title: str, q: float) -> Panel:
    return lines(
        title,
        "resolve: asking the store what a name points to; wait: for a turn and for room; pull: "
        "from the store; copy: from the host tier to the device.",
        "s",
        Query(INFERENCE.quantile(q, "load_phase_seconds", "phase"), "{{phase}}"),
        links=[TO_STORE],
    )
