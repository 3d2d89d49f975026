"""Metrics of the resources that tenants share: how full each is, and who waits or was refused."""

from __future__ import annotations

from servicekit.shares import PlaceUse
from servicekit.telemetry.metrics import Definition, Namespace, Sample


def define_places(namespace: Namespace) -> tuple[Definition, ...]:
    return (
        namespace.gauge(
            "place_used",
            "Units in use of each resource that tenants share (docs/security.md): bytes "
            "if the name says so, else calls, threads, images or connections.",
            "place",
        ),
        namespace.gauge("place_capacity", "Number of units.", "place"),
        namespace.gauge("place_waiting", "Calls, or images, that wait for their turn.", "place"),
        namespace.counter(
            "place_refusals",
            "Calls that were refused because the resource was full or their tenant used its share.",
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
