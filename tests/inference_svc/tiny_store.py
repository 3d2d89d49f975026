"""A small fake store behind a real channel."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc

A = "sha256:" + "a" * 64

LAYOUT = "sha256:" + "1" * 64
ANNOUNCEMENT = "sha256:" + "a" * 64


@dataclass
class TinyStore(pb_grpc.AdapterStoreServiceServicer):
    """Answers from memory. `refuse` maps a method to the code that it answers with, `refused`
    counts those answers; `refusal` is what registrations end with. A store of before image format 2
    does not know vectors."""

    revision: int = 5
    oldest: int = 0
    layouts: list[pb.ModelLayout] = field(default_factory=list)
    announcements: list[pb.Announcement] = field(default_factory=list)
    announcement_id: str = ANNOUNCEMENT
    watched_from: list[int] = field(default_factory=list)
    watched_for: list[str] = field(default_factory=list)
    watches_ended: int = 0
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    refuse: dict[str, grpc.StatusCode] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    messages: list[pb.PullAdapterResponse] = field(default_factory=list)
    hang: bool = False
    pulls_ended: int = 0
    registered: list[tuple[pb.RegisterAdapterRequest, dict[str, str]]] = field(default_factory=list)
    refusal: status_pb2.Status | None = None
    knows_vectors: bool = True
    image_formats: tuple[int, ...] = (1, 2, 3)

    async def _check(self, method: str, context: Any) -> None:
        if method in self.refuse:
            self.refused[method] += 1
            await context.abort(self.refuse[method], "refused, because")

    async def GetAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._check("GetAdapter", context)
        adapter = pb.Adapter(name="default/upper", version=2, digest=A, rank=8, base_model="base")
        adapter.layout_states.add(layout_id="x", state=pb.IMAGE_STATE_PENDING)
        adapter.layout_states.add(
            layout_id=LAYOUT, state=pb.IMAGE_STATE_INCOMPATIBLE, reason="too wide"
        )
        return pb.GetAdapterResponse(adapter=adapter, revision=self.revision)

    async def ListAdapters(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._check("ListAdapters", context)
        names = [f"{tenant}/{request.page_token or 'first'}" for tenant in request.tenants]
        return pb.ListAdaptersResponse(
            adapters=[pb.Adapter(name=name, version=1, digest=A) for name in names],
            next_page_token="" if request.page_token else "second",
            revision=self.revision,
        )

    async def RegisterAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.registered.append((request, dict(context.invocation_metadata())))
        if self.refusal is not None:
            await context.abort_with_status(rpc_status.to_status(self.refusal))
        await self._check("RegisterAdapter", context)
        return pb.RegisterAdapterResponse(
            adapter=pb.Adapter(base_model="org/base"),
            revision=self.revision,
            base_model_reason="the only one",
            ignored_config_keys=["note"],
            warnings=["q_proj: too large"],
        )

    async def GetStoreStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetStoreStatusResponse(revision=self.revision)

    async def RegisterLayout(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._check("RegisterLayout", context)
        kinds = [target.kind for target in request.layout.targets]
        if not self.knows_vectors and pb.TARGET_KIND_VECTOR in kinds:  # in the words of 0.2.0
            index = kinds.index(pb.TARGET_KIND_VECTOR)
            text = f"layout.targets[{index}].kind: {pb.TARGET_KIND_VECTOR} is not known"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        asked = sorted(request.layout.image_formats)
        if not set(asked) & set(self.image_formats):
            known = list(self.image_formats)
            text = f"layout.image_formats: {asked} has none of this store's {known}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        self.layouts.append(request.layout)
        self.announcements.append(request.announcement)
        return pb.RegisterLayoutResponse(
            layout_id=LAYOUT, image_format=1, announcement_id=self.announcement_id
        )

    async def WatchAdapters(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.watched_from.append(request.since_revision)
        self.watched_for.append(request.announcement_id)
        await self._check("WatchAdapters", context)
        if request.since_revision < self.oldest:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "list again")
        try:
            while (event := await self.events.get()) is not None:
                yield pb.WatchAdaptersResponse(event=event)
        finally:
            self.watches_ended += 1

    async def PullAdapter(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            for message in self.messages:
                yield message
            if self.hang:
                await asyncio.sleep(60)
            await self._check("PullAdapter", context)
        finally:
            self.pulls_ended += 1

    def emit(self, revision: int, kind: int = pb.EVENT_KIND_BOOKMARK, name: str = "") -> None:
        self.events.put_nowait(pb.AdapterEvent(revision=revision, kind=kind, name=name))


def serve(body: Callable[[TinyStore, str], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        store = TinyStore()
        async with running(store) as (_, address), asyncio.timeout(60):
            return await body(store, address)

    return asyncio.run(main())


@asynccontextmanager
async def running(
    store: TinyStore, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """The server and its address. It is stopped at the end, whatever happens: one that is collected
    while it runs fails another test."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_AdapterStoreServiceServicer_to_server(store, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
