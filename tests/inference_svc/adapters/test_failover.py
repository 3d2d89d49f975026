"""Pulls from several replicas of the store, over real channels, while replicas fail."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from inference_svc.adapters.layout import ModelLayout
from inference_svc.errors import AdapterNotFound, AdapterUnusable, CorruptImage
from servicekit.errors import ServiceError
from tests.inference_svc.adapters.store_replicas import Block, ReplicaSet, abort
from tests.support.inference.loop import Loop, assert_computes
from tests.support.wait import until

DIGESTS = [f"sha256:{number:04d}" for number in range(48)]


@pytest.fixture
def stores() -> Iterator[ReplicaSet]:
    made = ReplicaSet(3)
    yield made
    made.close()


@pytest.fixture(params=[0, 1 << 20], ids=["arena-only", "host-tier"])
def loop(stores: ReplicaSet, layout: ModelLayout, request: pytest.FixtureRequest) -> Iterator[Loop]:
    made = Loop(stores.client, layout, 16384, request.param)
    yield made
    made.residency.loader.cancel_all()
    made.puller.close()


def used_bytes(loop: Loop) -> int:
    host = loop.residency.host
    return loop.residency.device.used_bytes + (0 if host is None else host.slots.used_bytes)


def failure_of(loop: Loop, digest: str) -> ServiceError:
    """Returns the error of its load; everything that it held is free again."""
    before = used_bytes(loop)
    loop.residency.add_waiter(digest, time.monotonic())
    loop.until(lambda: loop.failures)
    [(failed, error)] = loop.failures
    assert failed == digest
    loop.residency.remove_waiter(digest)
    assert used_bytes(loop) == before
    assert loop.residency.loads.num_jobs == 0
    assert isinstance(error, ServiceError)
    return error


# --- shares -------------------------------------------------------------------------------------


def load_all(loop: Loop, digests: list[str]) -> None:
    for digest in digests:
        loop.load(digest)
        loop.residency.release(digest)
        loop.residency.unload(digest)


@pytest.mark.slow
def test_dead_replica_moves_only_its_share(stores: ReplicaSet, layout: ModelLayout) -> None:
    for digest in DIGESTS:
        stores.add(digest)
    loop = Loop(stores.client, layout, 16384, 0)

    def served() -> dict[str, str]:
        """Returns addresses by digest, in the last round."""
        load_all(loop, DIGESTS)
        found = {digest: s.address for s in stores.servers for digest, _ in s.pulls}
        assert sum(len(server.pulls) for server in stores.servers) == len(DIGESTS)
        for server in stores.servers:
            server.pulls.clear()
        return found

    home = {digest: stores.order(digest)[0].address for digest in DIGESTS}
    assert served() == home
    shares = Counter(home.values())
    assert len(shares) == 3, "each has a share"
    victim = stores.servers[0]
    victim.kill()
    moved = {digest: stores.order(digest)[1].address for digest in DIGESTS}
    expected = {d: moved[d] if a == victim.address else a for d, a in home.items()}
    assert served() == expected
    victim.start()
    until(lambda: stores.replicas.statuses()[0].is_healthy)
    assert served() == home
    pulls = {status.address: status.pulls["done"] for status in stores.replicas.statuses()}
    again = Counter(expected.values())
    assert pulls == {address: 2 * shares[address] + again[address] for address in pulls}
    loop.puller.close()


# --- a replica fails while it streams -----------------------------------------------------------


def test_pull_resumes_at_another_replica(stores: ReplicaSet, loop: Loop) -> None:
    image = stores.add("aaaa")
    first, second, third = stores.order("aaaa")
    first.hook = block = Block(1)
    loop.residency.add_waiter("aaaa", time.monotonic())
    loop.until(block.reached.is_set)
    job = loop.residency.loads["aaaa"].job
    assert job is not None
    # Sent is not received: a connection that is closed loses the bytes that nobody has read.
    loop.until(lambda: job.progress.offset == image.ends[0])
    killer = threading.Thread(target=first.kill)
    killer.start()
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    assert_computes(loop, stores, "aaaa", loop.residency.acquire("aaaa"))
    assert second.pulls == [("aaaa", image.ends[0])]
    assert third.pulls == []
    assert stores.replicas.num_failovers == 1
    block.go.set()
    killer.join()


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DATA_LOSS", "INTERNAL", "RESOURCE_EXHAUSTED"])
@pytest.mark.parametrize("part", [0, 2, 3])
def test_truncated_stream_resumes_elsewhere(
    stores: ReplicaSet, layout: ModelLayout, code: str, part: int
) -> None:
    image = stores.add("aaaa")
    first, second, _ = stores.order("aaaa")
    first.hook = abort(part, grpc.StatusCode[code])
    loop = Loop(stores.client, layout, 16384, 1 << 20)
    assert_computes(loop, stores, "aaaa", loop.load("aaaa"))
    assert second.pulls == [("aaaa", (0, *image.ends)[part])]
    is_out = code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
    states = {status.address: status.is_healthy for status in stores.replicas.statuses()}
    assert states[second.address]
    assert is_out or states[first.address], "one adapter's trouble is not the replica's"
    loop.puller.close()


def test_all_replicas_are_tried(stores: ReplicaSet, loop: Loop) -> None:
    stores.add("aaaa")
    for server in stores.servers:
        server.hook = abort(1, grpc.StatusCode.UNAVAILABLE)
    loop.residency.add_waiter("aaaa", time.monotonic())
    loop.until(lambda: all(server.pulls for server in stores.servers))
    stores.servers[1].hook = lambda part, context: None
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    assert_computes(loop, stores, "aaaa", loop.residency.acquire("aaaa"))


def test_corrupt_bytes_are_pulled_from_another_replica(stores: ReplicaSet, loop: Loop) -> None:
    good = stores.add("aaaa")
    first, second, _ = stores.order("aaaa")
    damaged = good.data[:-1] + bytes([good.data[-1] ^ 1])
    first.images = {"aaaa": replace(good, data=damaged)}
    first.claims = good
    assert_computes(loop, stores, "aaaa", loop.load("aaaa"))
    assert first.pulls == [("aaaa", 0)]
    assert second.pulls == [("aaaa", good.ends[-2])]


# --- what ends a pull ---------------------------------------------------------------------------


def test_unusable_adapter_fails_at_once(stores: ReplicaSet, loop: Loop) -> None:
    """The store finds it while it compiles: after the header, or after some bytes."""
    for part, digest in enumerate(("aaaa", "bbbb")):
        stores.add(digest)
        first, *others = stores.order(digest)
        first.hook = abort(part, grpc.StatusCode.FAILED_PRECONDITION)
        error = failure_of(loop, digest)
        assert isinstance(error, AdapterUnusable)
        assert error.message == "ended by the store"
        assert all(tried != digest for other in others for tried, _ in other.pulls)
        loop.failures.clear()
        first.hook = lambda part, context: None
    stores.add("good")
    assert_computes(loop, stores, "good", loop.load("good"))


def test_corrupt_everywhere_fails(stores: ReplicaSet, loop: Loop) -> None:
    stores.add("aaaa")
    for server in stores.servers:
        server.hook = abort(1, grpc.StatusCode.DATA_LOSS)
    assert isinstance(failure_of(loop, "aaaa"), CorruptImage)
    assert sum(len(server.pulls) for server in stores.servers) == 2


def test_unknown_at_one_replica_is_found_at_another(stores: ReplicaSet, loop: Loop) -> None:
    stores.add("aaaa")
    first, second, _ = stores.order("aaaa")
    first.images = {}
    assert_computes(loop, stores, "aaaa", loop.load("aaaa"))
    assert second.pulls == [("aaaa", 0)]
    assert isinstance(failure_of(loop, "none"), AdapterNotFound)
    tried = [server.address for server in stores.servers for d, _ in server.pulls if d == "none"]
    assert sorted(tried) == sorted(server.address for server in stores.servers)
    assert all(status.is_healthy for status in stores.replicas.statuses())


# --- slow streams -------------------------------------------------------------------------------


def test_slow_stream_is_not_silent(stores: ReplicaSet, loop: Loop) -> None:
    """The store compiles while it streams: time is counted from the last bytes."""
    image = stores.add("aaaa")
    blocks = [Block(part) for part in range(4)]
    server = stores.order("aaaa")[0]
    server.hook = lambda part, context: blocks[part](part, context)
    loop.residency.add_waiter("aaaa", time.monotonic())
    moments = []
    for block in blocks[:3]:
        loop.until(block.reached.is_set)
        before = loop.residency.loads.last_progress_s("aaaa")
        assert before is not None
        moments.append(before)
        block.go.set()
        loop.until(lambda before=before: loop.residency.loads.last_progress_s("aaaa") > before)
    loop.until(blocks[3].reached.is_set)
    assert moments == sorted(set(moments))
    assert not loop.residency.is_resident("aaaa"), "nothing is computed with before the trailer"
    blocks[3].go.set()
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    assert_computes(loop, stores, "aaaa", loop.residency.acquire("aaaa"))
    assert server.pulls == [("aaaa", 0)]
    assert loop.residency.counters.pulled_bytes == len(image.data)


def test_abandoned_stalled_stream_frees_its_memory(stores: ReplicaSet, loop: Loop) -> None:
    stores.add("aaaa")
    server = stores.order("aaaa")[0]
    server.hook = block = Block(1)
    before = used_bytes(loop)
    loop.residency.add_waiter("aaaa", time.monotonic())
    loop.until(lambda: block.reached.is_set() and used_bytes(loop) > before)
    loop.residency.remove_waiter("aaaa")
    loop.until(lambda: loop.residency.loads.num_jobs == 0)
    assert used_bytes(loop) == before
    block.go.set()
    until(lambda: sum(sum(s.pulls.values()) for s in stores.replicas.statuses()) == 1)
    assert stores.replicas.statuses()[stores.servers.index(server)].pulls == {"cancelled": 1}
