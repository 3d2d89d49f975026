"""Metrics of what tenants share: how full each place is, who waits for it, and what it refused."""

from __future__ import annotations

from servicekit.shares import PlaceUse
from servicekit.telemetry.metrics import Definition, Namespace, Sample


def define_places(namespace: Namespace) -> tuple[Definition, ...]:
    return (
        namespace.gauge(
            "place_used",
            "Units in use of what tenants share (docs/security.md): bytes of the places that are "
            "named so, else calls, threads, images or connections.",
            "place",
        ),
        namespace.gauge("place_capacity", "Units that there are.", "place"),
        namespace.gauge("place_waiting", "Calls, or images, that wait for their turn.", "place"),
        namespace.counter(
            "place_refusals",
            "Calls that were refused because the place was full, or their tenant had its share.",
            "place",
        ),
    )


def place_samples(use: PlaceUse) -> list[Sample]:
    return [
        Sample("place_used", use.used, (use.name,)),
        Sample("place_capacity", use.capacity, (use.name,)),
        Sample("place_waiting", use.num_waiting, (use.name,)),
        Sample("place_refusals", use.num_refused, (use.name,)),
    ]
