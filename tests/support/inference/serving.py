"""A running server over a fake engine, and a client of it."""

import asyncio
import urllib.request
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_status import rpc_status

from inference_svc.server import InferenceServer
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_pb_grpc
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from tests.support.wait import TIMEOUT_S

LAYOUT = "sha256:" + "1" * 64

SERVING = health_pb2.HealthCheckResponse.SERVING

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

MAX_MODEL_LEN = 64

SLOW_S = 2.0


def digest_of(name: str) -> str:
    return "sha256:" + name.encode().hex().rjust(64, "0")


class NameStore(store_pb_grpc.AdapterStoreServiceServicer):
    """Every name is registered, at version 1, with a digest made of it; "gone" is not, and the
    answer for "slow" takes SLOW_S."""

    async def GetAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802
        name = request.ref.partition("@")[0].removeprefix("default/")
        if name == "gone":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no adapter default/gone")
        if name == "slow":
            await asyncio.sleep(SLOW_S)
        adapter = store_pb.Adapter(
            name=f"default/{name}",
            version=1,
            digest=digest_of(name),
            rank=99 if name == "wide" else 8,
            base_model="other" if name == "foreign" else "base",
        )
        return store_pb.GetAdapterResponse(adapter=adapter, revision=3)

    async def GetStoreStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return store_pb.GetStoreStatusResponse(revision=3)

    async def RegisterAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802
        adapter = store_pb.Adapter(name=request.name, base_model="base")
        return store_pb.RegisterAdapterResponse(
            adapter=adapter,
            revision=3,
            base_model_reason="the only one",
            ignored_config_keys=["note", "other"],
            warnings=["q_proj: too large"],
        )

    async def RegisterLayout(self, request: Any, context: Any) -> Any:  # noqa: N802
        return store_pb.RegisterLayoutResponse(layout_id=LAYOUT, image_format=1)

    async def WatchAdapters(self, request: Any, context: Any) -> Any:  # noqa: N802
        while True:
            event = store_pb.AdapterEvent(revision=3, kind=store_pb.EVENT_KIND_BOOKMARK)
            yield store_pb.WatchAdaptersResponse(event=event)
            await asyncio.sleep(0.2)


class Running:
    """A server on a free port, its engine, and a client's stub."""

    def __init__(self, server: InferenceServer, engine: Any, channel: Any) -> None:
        self.server, self.engine = server, engine
        self.stub = pb_grpc.InferenceServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        self.stop = asyncio.Event()

    async def generate(self, text: str = "abc", timeout: float | None = None, **fields: Any) -> Any:
        request = pb.GenerateRequest(text=text, **fields)
        return [response async for response in self.stub.Generate(request, timeout=timeout)]

    async def health_of(self, service: str = "") -> int:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    def scrape(self) -> str:
        url = f"http://{self.server.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return str(response.read().decode())


async def error_of(awaitable: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


def subjects(error: grpc.aio.AioRpcError) -> Sequence[str]:
    """The fields named in BadRequest details."""
    status = rpc_status.from_call(error)
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(bad_request):
            return [violation.field for violation in bad_request.field_violations]
    return []
