"""Replicas of a store as small real servers, which tests block, break and kill."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from contract.protobuf import write_header
from inference_svc.store.client import ImageClient
from inference_svc.store.replicas import Replicas, rank
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc
from tests.support.inference.memory_store import LAYOUT_ID, TestImage, make_image

CHUNK_BYTES = 700

Hook = Callable[[int, grpc.ServicerContext], None]


@dataclass(eq=False)
class Replica(pb_grpc.AdapterStoreServiceServicer):
    """A replica that streams `images`. `hook` runs before each part is sent, with its number, and
    before the trailer; it may wait, or abort. `pulls` are the digests and offsets requested."""

    images: dict[str, TestImage]
    hook: Hook = lambda part, context: None
    pulls: list[tuple[str, int]] = field(default_factory=list)
    address: str = "127.0.0.1:0"
    claims: TestImage | None = None
    """The image whose hashes are sent, if not that of the bytes."""

    def start(self) -> None:
        """Listens on a free port the first time, later on the same."""
        self.server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_AdapterStoreServiceServicer_to_server(self, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port(self.address)}"
        self.server.start()

    def kill(self) -> None:
        self.server.stop(0).wait()

    def PullAdapter(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self.pulls.append((request.digest, request.offset))
        image = self.images.get(request.digest)
        if image is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no adapter")
        assert image is not None
        start = request.offset if request.image_id == image.header.image_id else 0
        yield pb.PullAdapterResponse(header=_header(image, start))
        begin, hashes = 0, b""
        for part, end in enumerate(image.ends):
            sha256 = hashlib.sha256((self.claims or image).data[begin:end]).digest()
            hashes += sha256
            if end > start:
                self.hook(part, context)
                for at in range(begin, end, CHUNK_BYTES):
                    data = image.data[at : min(at + CHUNK_BYTES, end)]
                    yield pb.PullAdapterResponse(chunk=pb.ImageChunk(offset=at, data=data))
                layer_end = pb.LayerEnd(part=part, end_offset=end, sha256=sha256)
                yield pb.PullAdapterResponse(layer_end=layer_end)
            begin = end
        self.hook(len(image.ends), context)
        trailer = pb.ImageTrailer(sha256=hashlib.sha256(hashes).digest())
        yield pb.PullAdapterResponse(trailer=trailer)


def _header(image: TestImage, offset: int) -> pb.ImageHeader:
    return write_header(replace(image.header, offset=offset))


class ReplicaSet:
    """Replicas over the same images, and a client to all of them."""

    def __init__(self, num_replicas: int) -> None:
        self.images: dict[str, TestImage] = {}
        self.servers = [Replica(self.images) for _ in range(num_replicas)]
        for server in self.servers:
            server.start()
        self.replicas = Replicas.at(*(server.address for server in self.servers))
        self.client = ImageClient(self.replicas)

    def close(self) -> None:
        self.client.close()
        for server in self.servers:
            server.kill()

    def add(self, digest: str) -> TestImage:
        self.images[digest] = make_image(digest, 4)
        return self.images[digest]

    def order(self, digest: str) -> list[Replica]:
        """Returns the servers in the order in which pulls of `digest` try them."""
        by_address = {server.address: server for server in self.servers}
        return [by_address[address] for address in rank(by_address, digest)]


class Block:
    """A hook that blocks a stream before a part; `reached` is set when it is there."""

    def __init__(self, part: int) -> None:
        self._part = part
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, part: int, context: grpc.ServicerContext) -> None:
        if part == self._part:
            self.reached.set()
            assert self.go.wait(60)


def abort(part: int, code: grpc.StatusCode) -> Hook:
    """A hook that ends the stream with a status before a part."""

    def hook(at: int, context: grpc.ServicerContext) -> None:
        if at == part:
            context.abort(code, "ended by the store")

    return hook


__all__ = ["LAYOUT_ID", "Block", "Replica", "ReplicaSet", "abort"]
