"""Which replicas a push waits for: real channels to replicas that die, come back and sleep."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.errors import NotLoaded
from loadout.inference.v1 import inference_pb2 as pb
from loadout.retry import ASLEEP
from tests.loadout.fakes import Asynchronous, Blocking, FakeReplica
from tests.support.loadout.tensors import CONFIG, A, B

TENSORS = {A: np.ones((2, 5), np.float32), B: np.ones((7, 2), np.float32)}


@pytest.fixture
def replica() -> Iterator[FakeReplica]:
    made = FakeReplica()
    yield made
    made.kill()


@pytest.fixture(params=[Blocking, Asynchronous], ids=["blocking", "async"])
def connect(request, fake_store, store_server) -> Iterator[Callable[..., Blocking | Asynchronous]]:
    """A client of these replicas, and of a store that takes every push."""
    answer = store_pb.UploadAdapterResponse(
        adapter=store_pb.Adapter(name="default/a", digest="sha256:1"), revision=1
    )
    fake_store.on("UploadAdapter", answer)
    with contextlib.ExitStack() as stack:

        def make(*addresses):
            client = request.param(*addresses, store=store_server.address)
            stack.callback(client.close)
            return client

        yield make


def push(client):
    return client.call("push", "a", TENSORS, CONFIG, wait="all")


def test_a_single_replica_that_was_restarted_is_waited_for(replica, connect) -> None:
    client = connect(replica.address)
    replica.kill()
    with pytest.raises(NotLoaded) as caught:
        push(client)
    assert caught.value.reason == "NO_REPLICA"
    assert not client.replicas()[0].is_healthy
    replica.start()
    time.sleep(2.5)  # gRPC's longest pause between two connections
    pushed = push(client)
    assert [each.address for each in pushed.replicas] == [replica.address]
    assert not pushed.skipped
    assert client.replicas()[0].is_healthy


def test_one_that_is_up_again_is_waited_for_before_a_probe_has_said_so(replica, connect) -> None:
    other = FakeReplica()
    with contextlib.ExitStack() as stack:
        stack.callback(other.kill)
        client = connect(replica.address, other.address)
        client.client._channels.fleet.replicas.mark_failed(replica.address)
        pushed = push(client)
    assert {each.address for each in pushed.replicas} == {replica.address, other.address}


def test_one_that_sleeps_is_skipped_at_once(replica, connect, fail) -> None:
    client = connect(replica.address)
    asleep = fail(grpc.StatusCode.UNAVAILABLE, ASLEEP, message="it is asleep")
    replica.service.on("LoadAdapter", asleep, pb.LoadAdapterResponse())
    with pytest.raises(NotLoaded, match="asleep") as caught:
        push(client)
    assert caught.value.reason == "NO_REPLICA"
    assert len(replica.service.requests["LoadAdapter"]) == 1
    assert [each.address for each in push(client).replicas] == [replica.address]
