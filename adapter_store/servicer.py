"""The AdapterStoreService: convert, call, convert. Errors are answered by the interceptor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.metadata import version
from typing import TypeAlias

import grpc

from adapter_store import convert
from adapter_store.refs import parse_name, parse_ref, parse_sha256
from adapter_store.registry import Registry
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc

Context: TypeAlias = grpc.aio.ServicerContext


class AdapterStoreServicer(pb_grpc.AdapterStoreServiceServicer):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def RegisterAdapter(  # noqa: N802
        self, request: pb.RegisterAdapterRequest, context: Context
    ) -> pb.RegisterAdapterResponse:
        asked = convert.from_registration(request)
        record, revision = await self._registry.register(asked, request.source_uri)
        return pb.RegisterAdapterResponse(adapter=convert.to_adapter(record), revision=revision)

    async def UploadAdapter(  # noqa: N802
        self, requests: AsyncIterator[pb.UploadAdapterRequest], context: Context
    ) -> pb.UploadAdapterResponse:
        asked, chunks = await convert.from_upload(requests)
        record, revision = await self._registry.upload(asked, chunks)
        return pb.UploadAdapterResponse(adapter=convert.to_adapter(record), revision=revision)

    async def GetAdapter(  # noqa: N802
        self, request: pb.GetAdapterRequest, context: Context
    ) -> pb.GetAdapterResponse:
        record, revision = await self._registry.get(parse_ref(request.ref))
        return pb.GetAdapterResponse(adapter=convert.to_adapter(record), revision=revision)

    async def ListAdapters(  # noqa: N802
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        records, token, revision = await self._registry.page(
            request.page_size, request.page_token, request.filter
        )
        return pb.ListAdaptersResponse(
            adapters=map(convert.to_adapter, records), next_page_token=token, revision=revision
        )

    async def DeleteAdapter(  # noqa: N802
        self, request: pb.DeleteAdapterRequest, context: Context
    ) -> pb.DeleteAdapterResponse:
        revision = await self._registry.delete(parse_name(request.name), request.version)
        return pb.DeleteAdapterResponse(revision=revision)

    async def PinAdapter(  # noqa: N802
        self, request: pb.PinAdapterRequest, context: Context
    ) -> pb.PinAdapterResponse:
        record, revision = await self._registry.set_pinned(parse_ref(request.ref), True)
        return pb.PinAdapterResponse(adapter=convert.to_adapter(record), revision=revision)

    async def UnpinAdapter(  # noqa: N802
        self, request: pb.UnpinAdapterRequest, context: Context
    ) -> pb.UnpinAdapterResponse:
        record, revision = await self._registry.set_pinned(parse_ref(request.ref), False)
        return pb.UnpinAdapterResponse(adapter=convert.to_adapter(record), revision=revision)

    async def RegisterLayout(  # noqa: N802
        self, request: pb.RegisterLayoutRequest, context: Context
    ) -> pb.RegisterLayoutResponse:
        layout_id, image_format = await self._registry.register_layout(
            convert.from_layout(request.layout), list(request.layout.image_formats)
        )
        return pb.RegisterLayoutResponse(layout_id=layout_id, image_format=image_format)

    async def PullAdapter(  # noqa: N802
        self, request: pb.PullAdapterRequest, context: Context
    ) -> AsyncIterator[pb.PullAdapterResponse]:
        digest = parse_sha256(request.digest, "digest")
        layout_id = parse_sha256(request.layout_id, "layout_id")
        pull = self._registry.pull(digest, layout_id, request.offset, request.image_id)
        async with aclosing(pull) as messages:
            async for message in messages:
                yield convert.to_pull_response(message)

    async def WatchAdapters(  # noqa: N802
        self, request: pb.WatchAdaptersRequest, context: Context
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        async with aclosing(self._registry.watch(request.since_revision)) as events:
            async for event in events:
                yield convert.to_event(event)

    async def GetStoreStatus(  # noqa: N802
        self, request: pb.GetStoreStatusRequest, context: Context
    ) -> pb.GetStoreStatusResponse:
        status = await self._registry.status()
        return pb.GetStoreStatusResponse(
            version=version("loadout"),
            revision=status.catalog.revision,
            adapters=status.catalog.adapters,
            layouts=status.catalog.layouts,
            memory=convert.to_tier_status(status.memory),
            disk=convert.to_tier_status(status.disk),
            blob_bytes=status.catalog.blob_bytes,
            active_pulls=status.active_pulls,
        )
