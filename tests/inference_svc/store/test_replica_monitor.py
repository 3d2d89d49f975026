"""Resolving the store's name, and replicas that come and go."""

import asyncio
import socket

import pytest

from inference_svc.store import replica_monitor
from inference_svc.store.replica_monitor import ReplicaMonitor, resolve
from inference_svc.store.replicas import Endpoint, Replicas
from tests.support.wait import until_async

HOSTS = {
    "one": ["10.0.0.1"],
    "store": ["10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.3"],
    "both": ["fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2"],
    "six": ["fd00::2", "fd00::1"],
}


failed_lookups: list[str] = []


def lookup(host: str, port: int) -> list[str]:
    if host not in HOSTS:
        failed_lookups.append(host)
        raise socket.gaierror(f"no {host}")
    return HOSTS[host]


def addresses_of(*addresses: str) -> list[str]:
    return [endpoint.address for endpoint in resolve(addresses, lookup)]


def test_name_with_several_addresses_is_several_replicas() -> None:
    assert addresses_of("store:7070") == ["10.0.0.1:7070", "10.0.0.2:7070", "10.0.0.3:7070"]
    assert addresses_of("both:7070") == ["10.0.0.1:7070", "10.0.0.2:7070"]
    assert addresses_of("six:7070") == ["[fd00::1]:7070", "[fd00::2]:7070"]
    assert resolve(["six:1"], lookup)[0] == Endpoint("[fd00::1]:1", "six"), (
        "the name of its certificate"
    )


def test_name_with_one_address_stays_unresolved() -> None:
    for address in ("one:7070", "localhost:7070", "127.0.0.1:7070", "[::1]:7070"):
        assert resolve([address], lookup) == [Endpoint(address)]


def test_each_replica_counts_once() -> None:
    assert addresses_of("10.0.0.2:7070", "store:7070") == [
        "10.0.0.2:7070",
        "10.0.0.1:7070",
        "10.0.0.3:7070",
    ]


def monitor(body, replicas: Replicas, *addresses: str, healthy: set[str]) -> None:
    """Runs `body` beside a monitor of `replicas`; those in `healthy` pass their probes."""

    async def probe(endpoint: Endpoint) -> bool:
        return endpoint.address in healthy

    async def main() -> None:
        monitor = ReplicaMonitor(replicas, addresses, probe, lookup)
        task = asyncio.create_task(monitor.run())
        try:
            await body()
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_replicas_follow_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it does not resolve, the previous ones stay."""
    monkeypatch.setattr(replica_monitor, "RESOLVE_SECONDS", 0.02)
    monkeypatch.setitem(HOSTS, "moving", ["10.0.0.1"])
    replicas = Replicas.at("moving:1")

    def now() -> list[str]:
        return [endpoint.address for endpoint in replicas.endpoints]

    async def body() -> None:
        HOSTS["moving"] = ["10.0.0.1", "10.0.0.2"]
        await until_async(lambda: now() == ["10.0.0.1:1", "10.0.0.2:1"])
        replicas.count_pull("10.0.0.2:1", "done", 5)
        num_failed = len(failed_lookups)
        del HOSTS["moving"]
        await until_async(lambda: len(failed_lookups) >= num_failed + 2)
        assert now() == ["10.0.0.1:1", "10.0.0.2:1"]
        HOSTS["moving"] = ["10.0.0.3", "10.0.0.2"]
        await until_async(lambda: now() == ["10.0.0.2:1", "10.0.0.3:1"])
        assert replicas.statuses()[0].pulls == {"done": 1}, "their state is kept"

    monitor(body, replicas, "moving:1", healthy=set())


def test_replica_is_readmitted_when_its_probe_passes() -> None:
    now_s = 1000.0
    addresses = ("127.0.0.1:1", "127.0.0.2:1")
    replicas = Replicas(map(Endpoint, addresses), lambda: now_s)
    healthy: set[str] = set()

    def failures() -> int:
        return replicas._replicas["127.0.0.1:1"].num_failures

    async def body() -> None:
        nonlocal now_s
        replicas.report_failure("127.0.0.1:1")
        for count, backoff_s in enumerate((0.5, 1.0, 2.0, 4.0, 8.0, 8.0), start=1):
            assert failures() == count
            now_s += backoff_s * 0.6
            await until_async(lambda count=count: failures() > count)
            assert not replicas.statuses()[0].is_healthy
        healthy.add("127.0.0.1:1")
        now_s += 5
        await until_async(lambda: replicas.statuses()[0].is_healthy)
        assert replicas.statuses()[1].is_healthy

    monitor(body, replicas, *addresses, healthy=healthy)


def test_probe_that_raises_does_not_end_the_monitor() -> None:
    replicas = Replicas.at("10.0.0.1:1")
    failures = [RuntimeError("a bug")]

    async def probe(endpoint: Endpoint) -> bool:
        if failures:
            raise failures.pop()
        return True

    async def main() -> None:
        task = asyncio.create_task(ReplicaMonitor(replicas, ["10.0.0.1:1"], probe).run())
        replicas.report_failure("10.0.0.1:1")
        await until_async(lambda: not failures and replicas.statuses()[0].is_healthy)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
