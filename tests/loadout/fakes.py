"""Replicas of a scripted inference service, and both clients behind one face."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from loadout import AsyncClient, Client
from loadout._routing.metadata import ADAPTER_HEADER, LOAD_HEADER
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from loadout.retry import RetryPolicy
from tests.support.loadout.scripted import FakeInference, Server

RETRY = RetryPolicy(max_attempts=4, first_backoff_s=0.02, max_backoff_s=0.1)
LOADED = (pb.LoadAdapterResponse(), pb.PinAdapterResponse(), pb.UnpinAdapterResponse())


class TellingHealth(health.HealthServicer):
    """Health checks whose answers tell a load."""

    def __init__(self) -> None:
        super().__init__()
        self.load = ""

    def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.load:
            context.set_trailing_metadata(((LOAD_HEADER, self.load),))
        return super().Check(request, context)


class FakeReplica:
    """Generates its own address. `keys` are the adapter headers that came, None without one."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.service = FakeInference()
        self.health = TellingHealth()
        self.keys: list[str | None] = []
        self.hold = threading.Event()
        self.hold.set()
        self.service.on("Generate", self.generate)
        self.service.on("GetServerInfo", self._inform)
        self.service.on("UnloadAdapter", pb.UnloadAdapterResponse(freed_bytes=1))
        for answer in LOADED:
            rpc = type(answer).__name__.removesuffix("Response")
            self.service.on(rpc, self._noting(answer))
        self.start(address)
        self.address = self.server.address

    def start(self, address: str = "") -> None:
        """The first time, and again after a kill."""

        def add(server: grpc.Server) -> None:
            pb_grpc.add_InferenceServiceServicer_to_server(self.service, server)
            health_pb2_grpc.add_HealthServicer_to_server(self.health, server)

        self.server = Server(add, address or self.address)

    def kill(self) -> None:
        self.server.kill()

    def tell_load(self, num_requests: int, max_sequences: int = 64) -> None:
        self.health.load = (
            f"TEXT named_metrics.num_requests={num_requests},"
            f"named_metrics.max_sequences={max_sequences}"
        )

    def drain(self) -> None:
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    def generate(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Yields the fake's address and then the end, once `hold` is set."""
        self._note(context)
        yield pb.GenerateResponse(text=self.address, token_ids=[1])
        while not self.hold.wait(0.01):
            if not context.is_active():
                return
        yield pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage())

    def _inform(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note(context)
        return pb.GetServerInfoResponse(base_model=self.address)

    def _noting(self, answer: Any) -> Callable[..., Any]:
        def behave(request: Any, context: grpc.ServicerContext) -> Any:
            self._note(context)
            return answer

        return behave

    def _note(self, context: grpc.ServicerContext) -> None:
        self.keys.append(dict(context.invocation_metadata()).get(ADAPTER_HEADER))


class Blocking:
    """`Client`, method for method."""

    def __init__(self, *addresses: str, **options: Any) -> None:
        self.client = Client(addresses, timeout_s=20, retry=RETRY, **options)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.client, name)(*arguments, **options)

    def start(self, adapter: str = "") -> Any:
        """A generation of which the first chunk has come."""
        stream = self.client.generate("hi", adapter=adapter)
        return stream, next(stream).text

    def finish(self, stream: Any) -> None:
        assert list(stream)

    def replicas(self) -> Any:
        return self.client.replicas()

    def pause(self) -> None:
        time.sleep(0.02)

    def close(self) -> None:
        self.client.close()


class Asynchronous:
    """`AsyncClient`, on a loop that runs while something is asked of it."""

    def __init__(self, *addresses: str, **options: Any) -> None:
        self._runner = asyncio.Runner()

        async def make() -> AsyncClient:
            return AsyncClient(addresses, timeout_s=20, retry=RETRY, **options)

        self.client = self._runner.run(make())

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return self._runner.run(getattr(self.client, name)(*arguments, **options))

    def start(self, adapter: str = "") -> Any:
        async def start() -> Any:
            stream = self.client.generate("hi", adapter=adapter)
            return stream, (await anext(stream)).text

        return self._runner.run(start())

    def finish(self, stream: Any) -> None:
        async def finish() -> None:
            assert [chunk async for chunk in stream]

        self._runner.run(finish())

    def replicas(self) -> Any:
        async def ask() -> Any:
            return self.client.replicas()

        return self._runner.run(ask())

    def pause(self) -> None:
        self._runner.run(asyncio.sleep(0.02))

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()
