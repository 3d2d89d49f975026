"""The dashboard of adapters and caches: busy adapters, their tiers, and the causes of waits."""

from __future__ import annotations

from tools.dashboards import limits, links, variables
from tools.dashboards.board import Board, Row
from tools.dashboards.boards import adapters_loads, adapters_tiers
from tools.dashboards.links import Link
from tools.dashboards.panels import Column, Panel, Query, lines, number, rows_by
from tools.dashboards.queries import INFERENCE, SAME_TARGET

_CHOSEN = f'adapter=~"$adapter",adapter!="{variables.NOT_ADAPTERS}"'
_TOP = 10


def build() -> Board:
    return Board(
        links.ADAPTERS,
        "Which adapters are busy, whether they fit into the tiers, and why their loads wait.",
        services=[INFERENCE],
        variables=[variables.adapter()],
        rows=[
            Row("Now", _now()),
            Row("Busiest adapters", _busiest()),
            Row("Tiers: hits", adapters_tiers.lookups()),
            Row("Tiers: evictions", adapters_tiers.evictions()),
            Row("Tiers: bytes", adapters_tiers.room()),
            Row("Loads", adapters_loads.loads()),
            Row("Prefetch", adapters_loads.prefetch()),
            Row("The store's replicas, as inference sees them", adapters_loads.replicas()),
        ],
    )


def _now() -> list[Panel]:
    return [*_loading(), *_trouble()]


def _loading() -> list[Panel]:
    return [
        number(
            "Found on the device",
            "Share of the requests for an adapter that find it resident.",
            "percentunit",
            adapters_tiers.found_on_device(),
        ),
        number(
            "Load, p99",
            "From the first request for an adapter until it was resident, of loads from the store.",
            "s",
            INFERENCE.quantile(0.99, "load_seconds", where='source="store"'),
            limit=limits.LOAD,
        ),
        number(
            "Waiting for an adapter",
            "Requests whose adapter is not resident.",
            "short",
            INFERENCE.sum("requests_waiting_for_adapter"),
        ),
        number(
            "Loads in progress",
            "Adapters that are being loaded or wait for it.",
            "short",
            INFERENCE.sum("loads_in_progress"),
        ),
    ]


def _trouble() -> list[Panel]:
    return [
        number(
            "Evictions",
            "Adapters evicted from the device per second.",
            "cps",
            INFERENCE.rate("tier_evictions_total", where='tier="device"'),
        ),
        number(
            "Thrash",
            "For each request with an adapter, adapters evicted that were used within the last "
            "minute: of the worst replica. See Tiers: evictions.",
            "percentunit",
            f"max({adapters_tiers.thrash()})",
            limit=limits.THRASH,
        ),
        number(
            "Failed pulls",
            "In the chosen time. See the store's replicas below, and the logs, for the reasons.",
            "short",
            INFERENCE.growth("pull_failures_total", window="$__range"),
            limit=limits.ANY,
            links=[links.TO_STORE],
        ),
        number(
            "Without the store",
            "Replicas whose watch of the store is down. For a while, they serve resident "
            "adapters and names that they know.",
            "short",
            _without_store(),
            limit=limits.ANY,
            missing="no store",
            links=[links.TO_STORE],
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
            link=Link(
                links.TO_ADAPTER.title, links.ADAPTERS, {"adapter": "${__data.fields.adapter}"}
            ),
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
            "Mean. Adapters that wait often are requested often enough to be loaded, and too "
            "seldom to stay: pin them, or give the arena more memory.",
            "s",
            INFERENCE.mean("adapter_load_wait_seconds", "adapter", _CHOSEN),
        ),
    ]


def _without_store() -> str:
    """Counts the replicas with a store that are not connected to it."""
    connected = (
        f"{INFERENCE.series('store_connected')} and {SAME_TARGET} "
        f"{INFERENCE.series('store_replicas_healthy')}"
    )
    return f"count(({connected}) == 0) or 0 * count({connected})"


def _top(title: str, description: str, unit: str, expression: str) -> Panel:
    query = Query(f"topk({_TOP}, {expression})", "{{adapter}}")
    return lines(title, description, unit, query, span=6, links=[links.TO_ADAPTER])


def _per_adapter(metric: str) -> str:
    return INFERENCE.rate(f"adapter_{metric}", "adapter", _CHOSEN, "$__range")


def _mean_per_adapter(metric: str) -> str:
    return INFERENCE.mean(f"adapter_{metric}", "adapter", _CHOSEN, "$__range")
