"""Panels of adapters and caches: the tiers' contents, hits and evictions."""

from __future__ import annotations

from tools.dashboards import limits
from tools.dashboards.panels import Panel, Query, distribution, lines
from tools.dashboards.queries import INFERENCE, REPLICA, WHICH, share

_DEVICE = 'tier="device"'
_WHERE = f"{{{{tier}}}} {WHICH}"


def lookups() -> list[Panel]:
    hits = INFERENCE.rate("tier_hits_total", "tier")
    return [
        lines(
            "Share of hits",
            "By tier. The host tier is searched only after a miss on the device.",
            "percentunit",
            Query(share(hits, INFERENCE.rate("tier_misses_total", "tier")), "{{tier}}"),
            maximum=1,
        ),
        lines(
            "Lookups",
            "Requests that found their adapter in a tier, and requests that did not.",
            "reqps",
            Query(hits, "{{tier}} hits"),
            Query(INFERENCE.rate("tier_misses_total", "tier"), "{{tier}} misses"),
        ),
        lines(
            "Share of hits by replica",
            "On the device. Large differences: requests are not routed by adapter.",
            "percentunit",
            Query(found_on_device(REPLICA), WHICH),
            maximum=1,
        ),
    ]


def evictions() -> list[Panel]:
    return [
        lines(
            "Thrash",
            "For each request with an adapter, adapters evicted from the last tier before the "
            "store that were used within the last minute. They do not all fit: more memory, more "
            "replicas, or routing by adapter.",
            "percentunit",
            Query(thrash(), _WHERE),
            span=6,
            limit=limits.THRASH,
        ),
        lines(
            "Evictions",
            "By reason: for an adapter that a request needs, or has needed for a long time (aged), "
            "for a prefetched one (prefetch), or by an operator (unload).",
            "cps",
            Query(INFERENCE.rate("tier_evictions_total", "tier, reason"), "{{tier}}: {{reason}}"),
            span=6,
            is_stacked=True,
        ),
        lines(
            "Idle before eviction",
            "Time since evicted adapters were last used, p10 and p50. Short times are thrash.",
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
            "In all tiers. Dark at the bottom: adapters are evicted although they were "
            "just in use.",
            "s",
            INFERENCE.buckets("tier_evicted_idle_seconds"),
            span=6,
        ),
    ]


def room() -> list[Panel]:
    used, capacity = INFERENCE.sum("tier_used_bytes", "tier"), "tier_capacity_bytes"
    free = f"({INFERENCE.series(capacity)} - {INFERENCE.series('tier_used_bytes')} > 0)"
    return [
        lines(
            "Bytes",
            "Used by adapters, used by pinned adapters, and capacity, in all replicas. A full tier "
            "is normal; a tier full of pinned adapters is not.",
            "bytes",
            Query(used, "{{tier}} used"),
            Query(INFERENCE.sum("tier_pinned_bytes", "tier"), "{{tier}} pinned"),
            Query(INFERENCE.sum(capacity, "tier"), "{{tier}} capacity"),
        ),
        lines(
            "Adapters",
            "In each tier, in all replicas, and the number of names exported for routers, by the "
            "routers' names of the tiers (gpu, cpu).",
            "short",
            Query(INFERENCE.sum("tier_images", "tier"), "{{tier}}"),
            Query(INFERENCE.sum("residency_series", "level"), "names on {{level}}"),
        ),
        lines(
            "Share pinned",
            "Of each tier's bytes. Pinned adapters are never evicted; the others share the rest.",
            "percentunit",
            Query(INFERENCE.series("instance_tier:loadout_inference_tier_pinned:ratio"), _WHERE),
            limit=limits.PINNED,
            maximum=1,
        ),
        lines(
            "Fragmentation",
            "Share of the free bytes outside the largest free range. High together with many "
            "evictions: adapters are split into extents, or evict more than their size.",
            "percentunit",
            Query(f"1 - {INFERENCE.series('tier_largest_free_bytes')} / {free}", _WHERE),
            span=12,
            maximum=1,
        ),
        lines(
            "Free ranges",
            "Number of ranges that the free bytes are in.",
            "short",
            Query(INFERENCE.series("tier_free_ranges"), _WHERE),
            span=12,
        ),
    ]


def thrash() -> str:
    """Returns the alert's expression, for the last tier before the store."""
    rate = "instance_tier:loadout_inference_tier_thrash:rate5m"
    host, device = (INFERENCE.series(rate, f'tier="{tier}"') for tier in ("host", "device"))
    asked = INFERENCE.series("instance:loadout_inference_adapter_lookups:rate5m")
    return f"({host} or ignoring (tier) {device}) / ignoring (tier) group_left () ({asked} > 0)"


def found_on_device(by: str = "") -> str:
    """Returns the share of look-ups on the device that hit."""
    hits = INFERENCE.rate("tier_hits_total", by, _DEVICE)
    return share(hits, INFERENCE.rate("tier_misses_total", by, _DEVICE))
