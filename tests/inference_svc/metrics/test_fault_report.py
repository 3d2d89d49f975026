"""The last scrapes of a server whose device has failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from inference_svc.errors import DeviceFault, EngineFailed
from inference_svc.metrics import fault_report
from inference_svc.metrics.fault_report import hold
from loadout.prometheus import scrape
from servicekit.telemetry.metrics_server import MetricsServer

FAILURE = EngineFailed.because("a step failed", DeviceFault.LOST, "reboot the node")
NAME = "loadout_inference_device_faults_total"


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where scrapes are answered."""
    found: list[str] = []

    class Listening(MetricsServer):
        def __init__(self, registry: Any, host: str, port: int) -> None:
            super().__init__(registry, host, port)
            found.append(f"{host}:{self.port}")

    monkeypatch.setattr(fault_report, "MetricsServer", Listening)
    return found


def held(body: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(main())


def test_scrapes_see_the_fault_until_the_server_is_stopped(
    addresses: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        stop = asyncio.Event()
        holding = asyncio.create_task(hold(FAILURE, "127.0.0.1:0", 600, stop))
        while not addresses:
            await asyncio.sleep(0)
        found = await asyncio.to_thread(scrape, addresses[0])
        kinds = {kind: found.one(NAME, kind=kind.value) for kind in DeviceFault}
        assert kinds == {kind: float(kind is DeviceFault.LOST) for kind in DeviceFault}
        assert found.one("process_start_time_seconds") > 0
        assert not holding.done()
        stop.set()
        await holding

    held(body())
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message.endswith("; reboot the node")
    assert (record.__dict__["fault"], record.__dict__["hold_seconds"]) == ("lost", 600)


def test_the_process_ends_by_itself(addresses: list[str]) -> None:
    held(hold(FAILURE, "127.0.0.1:0", 0.0, asyncio.Event()))
    assert len(addresses) == 1


def test_a_port_that_is_taken_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    """The time counts all the same: a broken device is not tried again at once."""
    other = MetricsServer(fault_report.MetricRegistry(fault_report.DEFINITIONS), "127.0.0.1", 0)
    began_s = time.monotonic()
    try:
        held(hold(FAILURE, f"127.0.0.1:{other.port}", 0.2, asyncio.Event()))
    finally:
        other.close()
    assert time.monotonic() - began_s >= 0.2
    assert "the fault is not in the metrics: cannot listen" in caplog.text
