"""The adapter store over gRPC: its catalog for the event loop, its images for pull threads.

Both choose among the replicas by the same policy, and tell it what became of each choice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_svc.adapters.image_source import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    PullMessage,
    PullStream,
)
from inference_svc.adapters.layout import ModelLayout
from inference_svc.errors import AdapterNotFound, InferenceError, StoreUnavailable
from inference_svc.spans import outgoing
from inference_svc.store.catalog import AdapterPage, Source
from inference_svc.store.channel_pool import Line, Lines
from inference_svc.store.convert import (
    from_layout,
    is_about,
    to_error,
    to_event,
    to_pull_message,
    to_record,
    to_refusal,
)
from inference_svc.store.credentials import NO_ACCESS, Metadata, StoreAccess
from inference_svc.store.directory import NameEvent
from inference_svc.store.name_cache import AdapterRecord
from inference_svc.store.replicas import Endpoint, Replicas
from inference_svc.store.watch import HistoryGone
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

ANSWER_SECONDS = 5.0
"""A store that takes longer for a question about its catalog counts as unreachable."""
TURN_SECONDS = 2.0
"""A replica that takes longer is passed over while there is another to be asked."""
PROBE_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""The watch speaks every second; silent for this long, its connection is taken for dead."""
REGISTER_SECONDS = 600.0
"""For a store that fetches a large adapter from far away."""

T = TypeVar("T")


class CatalogClient:
    """Questions about names, from whichever replica answers. Lives on one event loop."""

    def __init__(self, replicas: Replicas, access: StoreAccess = NO_ACCESS) -> None:
        self._replicas = replicas
        self._access = access
        self._lines = Lines(grpc.aio, replicas, access)
        # Of our own, so that the inference services spread over the replicas.
        self._key = secrets.token_hex(8)

    async def close(self) -> None:
        for channel in self._lines.take_all():
            await channel.close()

    async def get_adapter(self, ref: str, tenants: Collection[str] = ()) -> AdapterRecord:
        """As the store would tell a caller of these tenants; none: of all that we serve. Raises
        AdapterNotFound; StoreUnavailable when no replica answers."""
        return await self._ask_any(lambda one, patience: one.get_adapter(ref, tenants, patience))

    async def list_adapters(
        self, tenants: Collection[str], page_size: int, page_token: str
    ) -> AdapterPage:
        """See Registry."""
        return await self._ask_any(
            lambda one, patience: one.list_adapters(tenants, page_size, page_token, patience)
        )

    async def register(self, name: str, source: Source, token: str | None) -> int:
        """See Registry."""
        metadata = self._access.passing_on(token)
        return await self._ask_any(lambda one, _: one.register(name, source, metadata))

    async def connect(self, avoid: Collection[str] = ()) -> CatalogSession:
        """To one replica, of which nothing has been asked yet. Raises nothing."""
        await self._close_unused()
        return self._session(self._replicas.order(self._key, avoid)[0])

    async def probe(self, endpoint: Endpoint) -> bool:
        """Whether a replica says that it serves. Health is told without a token."""
        await self._close_unused()
        line = self._lines.begin(endpoint)
        check = health_pb2_grpc.HealthStub(line.channel).Check
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return True  # it is there, and has no health service
            self._lines.retire(line)
            return False
        finally:
            self._lines.end(line)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _ask_any(self, ask: Callable[[CatalogSession, float], Awaitable[T]]) -> T:
        """`ask` of one replica after the other, with the patience that it may have."""
        await self._close_unused()
        *others, last = self._replicas.order(self._key)
        for endpoint in others:
            try:
                return await ask(self._session(endpoint), TURN_SECONDS)
            except StoreUnavailable:
                self._replicas.count_failover()
        return await ask(self._session(last), ANSWER_SECONDS)

    def _session(self, endpoint: Endpoint) -> CatalogSession:
        return CatalogSession(self._lines, endpoint, self._access)

    async def _close_unused(self) -> None:
        for channel in self._lines.take_unused():
            await channel.close()


class CatalogSession:
    """One replica's catalog. Every method raises StoreUnavailable when it does not answer."""

    def __init__(self, lines: Lines, endpoint: Endpoint, access: StoreAccess) -> None:
        self.source = endpoint.address
        self._lines = lines
        self._endpoint = endpoint
        self._access = access

    async def get_adapter(
        self, ref: str, tenants: Collection[str] = (), timeout_s: float = ANSWER_SECONDS
    ) -> AdapterRecord:
        """Raises AdapterNotFound."""
        request = pb.GetAdapterRequest(ref=ref, tenants=sorted(tenants))
        response = await self._ask("GetAdapter", request, timeout_s)
        return to_record(response.adapter, response.revision)

    async def list_adapters(
        self, tenants: Collection[str], page_size: int, page_token: str, timeout_s: float
    ) -> AdapterPage:
        """Raises InvalidRequest for a token of another list."""
        request = pb.ListAdaptersRequest(
            page_size=page_size, page_token=page_token, tenants=sorted(tenants)
        )
        response = await self._ask("ListAdapters", request, timeout_s)
        records = [to_record(adapter, response.revision) for adapter in response.adapters]
        return AdapterPage(records, response.next_page_token)

    async def register(self, name: str, source: Source, metadata: Metadata) -> int:
        """With the caller's own `metadata`: what the store refuses says nothing about itself."""
        line = self._lines.begin(self._endpoint)
        request = pb.RegisterAdapterRequest(
            name=name, source_uri=source.uri, base_model=source.base_model
        )
        try:
            response = await line.stub.RegisterAdapter(
                request, timeout=REGISTER_SECONDS, metadata=(*metadata, *outgoing())
            )
        except grpc.RpcError as error:
            refusal = to_refusal(error)
            if refusal is not None:
                raise refusal from error
            self._lines.failed(line, error.code())
            raise to_error(error) from error
        finally:
            self._lines.end(line)
        self._lines.answered(line)
        return int(response.revision)

    async def get_revision(self) -> int:
        """The catalog's revision now."""
        status = await self._ask("GetStoreStatus", pb.GetStoreStatusRequest())
        return int(status.revision)

    async def register_layout(self, layout: ModelLayout) -> str:
        """The layout's id. Raises AdapterUnusable when we share no image format."""
        request = pb.RegisterLayoutRequest(layout=from_layout(layout))
        return str((await self._ask("RegisterLayout", request)).layout_id)

    async def watch(self, since_revision: int) -> AsyncIterator[NameEvent]:
        """Changes of names after a revision, and bookmarks. Raises HistoryGone."""
        line = self._lines.begin(self._endpoint)
        request = pb.WatchAdaptersRequest(since_revision=since_revision)
        call = line.stub.WatchAdapters(request, metadata=self._access.metadata())
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    response = await call.read()
                if response is grpc.aio.EOF:
                    raise StoreUnavailable("the store ended the watch")
                self._lines.answered(line)
                yield to_event(response.event)
        except TimeoutError:
            self._lines.failed(line, grpc.StatusCode.DEADLINE_EXCEEDED)
            raise StoreUnavailable("the store's watch has fallen silent") from None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                raise HistoryGone from error
            self._lines.failed(line, error.code())
            raise to_error(error) from error
        finally:
            call.cancel()
            self._lines.end(line)

    async def _ask(self, method: str, request: Any, timeout_s: float = ANSWER_SECONDS) -> Any:
        line = self._lines.begin(self._endpoint)
        ask = getattr(line.stub, method)
        metadata = (*self._access.metadata(), *outgoing())
        try:
            answer = await ask(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            self._lines.failed(line, error.code())
            raise to_error(error) from error
        finally:
            self._lines.end(line)
        self._lines.answered(line)
        return answer


class ImageClient:
    """The AdapterStore of pull threads: channels of its own, blocking iterators."""

    def __init__(self, replicas: Replicas, access: StoreAccess = NO_ACCESS) -> None:
        self._replicas = replicas
        self._access = access
        self._lines = Lines(grpc, replicas, access)

    def close(self) -> None:
        for channel in self._lines.take_all():
            channel.close()

    def pull(
        self,
        digest: str,
        layout_id: str,
        offset: int = 0,
        image_id: str = "",
        avoid: Collection[str] = (),
    ) -> PullStream:
        for channel in self._lines.take_unused():
            channel.close()
        chosen, *others = self._replicas.order(digest, avoid)
        if avoid and chosen.address not in avoid:
            self._replicas.count_failover()
        request = pb.PullAdapterRequest(
            digest=digest, layout_id=layout_id, offset=offset, image_id=image_id
        )
        line = self._lines.begin(chosen)
        call = line.pull(request, metadata=(*self._access.metadata(), *outgoing()))
        call.add_done_callback(lambda _: self._lines.end(line))
        is_last = all(other.address in avoid for other in others)
        return _ImageStream(self._replicas, self._lines, line, call, layout_id, is_last)


class NoStore:
    """The AdapterStore of a server without one; nothing resolves, so nothing is pulled."""

    def close(self) -> None:
        pass

    def pull(
        self,
        digest: str,
        layout_id: str,
        offset: int = 0,
        image_id: str = "",
        avoid: Collection[str] = (),
    ) -> PullStream:
        raise AdapterNotFound("this server has no adapter store", subject="adapter")


class _ImageStream:
    """`is_last`: no other replica is left to be asked."""

    def __init__(
        self,
        replicas: Replicas,
        lines: Lines,
        line: Line,
        call: Any,
        layout_id: str,
        is_last: bool,
    ) -> None:
        self.source = line.endpoint.address
        self._replicas = replicas
        self._lines = lines
        self._line = line
        self._call = call
        self._layout_id = layout_id
        self._is_last = is_last

    def __iter__(self) -> Iterator[PullMessage]:
        num_bytes, result = 0, "cancelled"
        try:
            for response in self._call:
                message = to_pull_message(response)
                if isinstance(message, ImageHeader):
                    self._lines.answered(self._line)
                elif isinstance(message, ImageChunk):
                    num_bytes += len(message.data)
                elif isinstance(message, ImageTrailer):
                    result = "done"
                yield message
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                result = "failed"
            raise self._to_error(error) from error
        finally:
            self._call.cancel()
            self._replicas.count_pull(self.source, result, num_bytes)

    def cancel(self) -> None:
        self._call.cancel()

    def _to_error(self, error: grpc.RpcError) -> InferenceError:
        self._lines.failed(self._line, error.code())
        if is_about(error, self._layout_id):
            # A store that lost our layout hears of it again when the watch reconnects.
            return StoreUnavailable("the store does not know our layout")
        if error.code() is grpc.StatusCode.NOT_FOUND and not self._is_last:
            return StoreUnavailable("a replica does not know the adapter; the others are asked")
        return to_error(error)
