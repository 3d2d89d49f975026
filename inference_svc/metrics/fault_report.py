"""Reports a device's fault for a while before the process ends, because a counter of a process that
ends at once would never be scraped, and a device that is broken for good would be tried again at
once."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from prometheus_client import Counter

from inference_svc.errors import DeviceFault, EngineFailed
from inference_svc.metrics.definitions import DEFINITIONS
from servicekit.settings.addresses import split_address
from servicekit.telemetry.metrics import MetricRegistry
from servicekit.telemetry.metrics_server import MetricsServer

logger = logging.getLogger(__name__)


def count_faults(registry: MetricRegistry) -> Counter:
    """Returns the counter of faults, where each kind begins at 0."""
    counter = registry.counter("device_faults")
    for kind in DeviceFault:
        counter.labels(kind.value)
    return counter


async def hold(
    failure: EngineFailed, metrics_listen: str, hold_s: float, stop: asyncio.Event
) -> None:
    """Logs the fault, and answers scrapes with it for so many seconds, or until `stop`. Everything
    else of the server is closed."""
    assert failure.fault is not None, "a device's fault"
    fields = {"fault": failure.fault.value, "hold_seconds": hold_s}
    logger.error("%s", failure.for_operator, extra=fields)
    registry = MetricRegistry(DEFINITIONS)
    count_faults(registry).labels(failure.fault.value).inc()
    try:
        server = MetricsServer(registry, *split_address(metrics_listen))
    except OSError as error:
        logger.warning("the fault is not in the metrics: %s", error)
        server = None
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), hold_s)
    finally:
        if server is not None:
            await asyncio.to_thread(server.close)
