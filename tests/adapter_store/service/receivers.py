"""Services that receive images of a store as files, and the calls that they make one by one."""

from __future__ import annotations

import gc
import queue
import socket
from pathlib import Path

from contract.images.sharing import GREETING, SHARE_ID_BYTES
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.pulls.pull import (
    ImageSink,
    PullDone,
    PullFailed,
    PullFilled,
    PullJob,
    PullOpened,
)
from inference_svc.adapters.pulls.registration import Registrations
from inference_svc.adapters.pulls.threads import Puller
from inference_svc.store.client import ImageClient
from inference_svc.store.replicas import Replicas
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.wait import TIMEOUT_S, until


class Receiver:
    """An inference service's pulls, each into memory of its own."""

    def __init__(
        self, address: str, path: Path | None, registrations: Registrations | None = None
    ) -> None:
        self.replicas = Replicas.at(address)
        self.client = ImageClient(self.replicas, share_socket=path)
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self._known: dict[str, int] = {}
        self.puller = Puller(
            self.client,
            2,
            self.events.put,
            lambda header: header,
            lambda header, read: None,
            registrations=registrations,
        )

    def pull(self, digest: str, layout_id: str) -> bytes:
        """The image's bytes, or raises why there are none."""
        job, memory = PullJob(digest, layout_id), bytearray()
        self.puller.start(job)
        while isinstance(event := self.events.get(timeout=TIMEOUT_S), PullOpened):
            size = event.header.total_bytes
            memory = bytearray(size)
            if job.grant(ImageSink(memoryview(memory), [Extent(0, 0, size)])):
                self.puller.start(job)
        if isinstance(event, PullFailed):
            assert event.error is not None
            raise event.error
        assert isinstance(event, PullDone)
        if event.registered is not None:
            assert self.events.get(timeout=TIMEOUT_S) == PullFilled(job)
        return bytes(memory)

    def ways(self) -> set[str]:
        """How the bytes came since the last time; an attempt that waited for memory counts, too."""
        found = self.replicas.shares()
        new = {how for how, count in found.items() if count > self._known.get(how, 0)}
        self._known = found
        return new

    def close(self) -> None:
        self.puller.close()
        self.client.close()


def greeted(path: Path) -> tuple[socket.socket, bytes]:
    """A connection, and the id that the store greets it with."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(path))
    greeting = b""
    while len(greeting) < len(GREETING) + SHARE_ID_BYTES:
        data = connection.recv(100)
        if not data:
            connection.close()
            raise ConnectionError
        greeting += data
    return connection, greeting.removeprefix(GREETING)


def ask(store, key: tuple[str, str], share_id: bytes):
    """A call with its header."""
    request = pb.PullAdapterRequest(digest=key[0], layout_id=key[1], share_id=share_id)
    call = store.client.stub.PullAdapter(request)
    return call, next(call).header


def until_released(store) -> None:
    """Waits until no receiver has an image, for the store."""
    places = store.running.store.use_cases.pulls.shared_images
    until(lambda: places.used == 0)


def until_sealed(store, key, path: Path) -> None:
    """Waits until an image can be shared: views of its earlier, writable memory may live on in a
    stream that has just ended."""

    def is_sealed() -> bool:
        gc.collect()
        connection, share_id = greeted(path)
        call, header = ask(store, key, share_id)
        call.cancel()
        connection.close()
        until_released(store)
        return header.not_shared != "in_use"

    until(is_sealed)
