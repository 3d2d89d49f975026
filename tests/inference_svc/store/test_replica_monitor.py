"""What the store's names stand for, and replicas that come and go."""

import asyncio
import socket
from functools import partial

import pytest

from inference_svc.store import replica_monitor
from inference_svc.store.replica_monitor import ReplicaKeeper, resolve
from inference_svc.store.replicas import Endpoint, Replicas
from tests.inference_svc import serving

until = partial(serving.until, timeout_s=20.0)

HOSTS = {
    "one": ["10.0.0.1"],
    "store": ["10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.3"],
    "both": ["fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2"],
    "six": ["fd00::2", "fd00::1"],
}


def lookup(host: str, port: int) -> list[str]:
    if host not in HOSTS:
        raise socket.gaierror(f"no {host}")
    return HOSTS[host]


def addresses_of(*addresses: str) -> list[str]:
    return [endpoint.address for endpoint in resolve(addresses, lookup)]


def test_a_name_of_several_addresses_is_several_replicas() -> None:
    assert addresses_of("store:7070") == ["10.0.0.1:7070", "10.0.0.2:7070", "10.0.0.3:7070"]
    assert addresses_of("both:7070") == ["10.0.0.1:7070", "10.0.0.2:7070"]
    assert addresses_of("six:7070") == ["[fd00::1]:7070", "[fd00::2]:7070"]
    assert resolve(["six:1"], lookup)[0] == Endpoint("[fd00::1]:1", "six"), "whose certificate"


def test_what_stands_for_one_stays_as_it_is_written() -> None:
    for address in ("one:7070", "localhost:7070", "127.0.0.1:7070", "[::1]:7070"):
        assert resolve([address], lookup) == [Endpoint(address)]


def test_each_replica_counts_once() -> None:
    assert addresses_of("10.0.0.2:7070", "store:7070") == [
        "10.0.0.2:7070",
        "10.0.0.1:7070",
        "10.0.0.3:7070",
    ]


def keep(body, replicas: Replicas, *addresses: str, well: set[str]) -> None:
    """Runs `body` while a keeper looks after `replicas`; those in `well` pass their probes."""

    async def probe(endpoint: Endpoint) -> bool:
        return endpoint.address in well

    async def main() -> None:
        keeper = ReplicaKeeper(replicas, addresses, probe, lookup)
        task = asyncio.create_task(keeper.run())
        try:
            await body()
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_replicas_follow_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it does not resolve: then those of before stay."""
    monkeypatch.setattr(replica_monitor, "RESOLVE_SECONDS", 0.02)
    monkeypatch.setitem(HOSTS, "moving", ["10.0.0.1"])
    replicas = Replicas.at("moving:1")

    def now() -> list[str]:
        return [endpoint.address for endpoint in replicas.endpoints]

    async def body() -> None:
        HOSTS["moving"] = ["10.0.0.1", "10.0.0.2"]
        await until(lambda: now() == ["10.0.0.1:1", "10.0.0.2:1"])
        replicas.count_pull("10.0.0.2:1", "done", 5)
        del HOSTS["moving"]
        await asyncio.sleep(0.1)
        assert now() == ["10.0.0.1:1", "10.0.0.2:1"]
        HOSTS["moving"] = ["10.0.0.3", "10.0.0.2"]
        await until(lambda: now() == ["10.0.0.2:1", "10.0.0.3:1"])
        assert replicas.statuses()[0].pulls == {"done": 1}, "what is known is kept"

    keep(body, replicas, "moving:1", well=set())


def test_a_replica_comes_back_when_its_probe_passes_and_not_before() -> None:
    now_s = 1000.0
    addresses = ("127.0.0.1:1", "127.0.0.2:1")
    replicas = Replicas(map(Endpoint, addresses), lambda: now_s)
    well: set[str] = set()

    def failures() -> int:
        return replicas._replicas["127.0.0.1:1"].num_failures

    async def body() -> None:
        nonlocal now_s
        replicas.failed("127.0.0.1:1")
        for count, backoff_s in enumerate((0.5, 1.0, 2.0, 4.0, 8.0, 8.0), start=1):
            assert failures() == count
            now_s += backoff_s * 0.6
            await until(lambda count=count: failures() > count)
            assert not replicas.statuses()[0].is_in
        well.add("127.0.0.1:1")
        now_s += 5
        await until(lambda: replicas.statuses()[0].is_in)
        assert replicas.statuses()[1].is_in

    keep(body, replicas, *addresses, well=well)


def test_a_probe_that_fails_unexpectedly_ends_nothing() -> None:
    replicas = Replicas.at("10.0.0.1:1")
    failures = [RuntimeError("a bug")]

    async def probe(endpoint: Endpoint) -> bool:
        if failures:
            raise failures.pop()
        return True

    async def main() -> None:
        keeper = asyncio.create_task(ReplicaKeeper(replicas, ["10.0.0.1:1"], probe).run())
        replicas.failed("10.0.0.1:1")
        await until(lambda: not failures and replicas.statuses()[0].is_in)
        assert not keeper.done()
        keeper.cancel()

    asyncio.run(main())
