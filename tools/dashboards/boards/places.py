"""Panels of the resources that tenants share, the same for both services."""

from __future__ import annotations

from tools.dashboards.panels import Panel, Query, lines
from tools.dashboards.queries import Service


def places(service: Service) -> list[Panel]:
    used, capacity = service.series("place_used"), service.series("place_capacity")
    return [
        lines(
            "Share in use",
            "Share of each limited resource in the fullest replica. One tenant gets at "
            "most its share of the rest, so several tenants use a full resource.",
            "percentunit",
            Query(f"max by (place) ({used} / {capacity})", "{{place}}"),
            span=8,
            maximum=1,
        ),
        lines(
            "Waiting for their turn",
            "Calls, or images to be built, by the resource that they wait for. Tenants take turns.",
            "short",
            Query(service.sum("place_waiting", "place"), "{{place}}"),
            span=8,
        ),
        lines(
            "Refusals",
            "SHARE_EXCEEDED: the resource was full, or the tenant used its share.",
            "cps",
            Query(service.rate("place_refusals_total", "place"), "{{place}}"),
            span=8,
        ),
    ]
