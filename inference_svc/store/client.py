"""The adapter store over gRPC: its catalog for the event loop, its images for pull threads.

Both choose among the replicas by the same policy, and report to it how each call ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.images.header import ImageChunk, ImageHeader, ImageTrailer, LayerEnd, PullMessage
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.pulls.image_source import MappedImage, PullStream
from inference_svc.config import InferenceSettings
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnusable,
    CorruptImage,
    StoreUnavailable,
    notes_of,
)
from inference_svc.store.channel_pool import ChannelPool, PooledChannel
from inference_svc.store.convert import (
    from_registration,
    is_about,
    knows_no_float8,
    knows_no_vectors,
    to_error,
    to_event,
    to_forwarded_error,
    to_record,
)
from inference_svc.store.credentials import NO_ACCESS, Metadata, StoreAccess, read_store_access
from inference_svc.store.replicas import Endpoint, Replicas
from inference_svc.store.shared_images import PullCall, ShareSocket
from inference_svc.store.types import (
    AcceptedLayout,
    AdapterPage,
    AdapterRecord,
    Announcement,
    HistoryGone,
    NameEvent,
    Registered,
    Source,
)
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import InvalidArgument, ServiceError
from servicekit.telemetry.logs import configure_logging
from servicekit.telemetry.spans import outgoing_headers

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
"""A store that takes longer for a catalog call counts as unreachable."""
FAILOVER_SECONDS = 2.0
"""A slower replica is abandoned while there is another one to try."""
PROBE_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""The watch sends events every second; silent for this long, its connection counts as dead."""
REGISTER_SECONDS = 600.0
"""Allows for a store that fetches a large adapter from far away."""

T = TypeVar("T")


class CatalogClient:
    """Catalog calls, answered by whichever replica is up. Lives on one event loop."""

    def __init__(self, replicas: Replicas, access: StoreAccess = NO_ACCESS) -> None:
        self._replicas = replicas
        self._access = access
        self._channels = ChannelPool(grpc.aio, replicas, access)
        # A random one, so that the inference services spread over the replicas.
        self._key = secrets.token_hex(8)
        self._is_down = False

    async def close(self) -> None:
        for channel in self._channels.pop_all():
            await channel.close()

    async def get_adapter(self, ref: str, tenants: Collection[str] = ()) -> AdapterRecord:
        """See Catalog."""
        return await self._try_replicas(
            lambda session, timeout_s: session.get_adapter(ref, tenants, timeout_s)
        )

    async def get_text(self, digest: str) -> bytes:
        """See TextSource."""
        return await self._try_replicas(
            lambda session, timeout_s: session.get_text(digest, timeout_s)
        )

    async def list_adapters(
        self, tenants: Collection[str], page_size: int, page_token: str
    ) -> AdapterPage:
        """See Registry."""
        return await self._try_replicas(
            lambda session, timeout_s: session.list_adapters(
                tenants, page_size, page_token, timeout_s
            )
        )

    async def register(self, name: str, source: Source, token: str | None) -> Registered:
        """See Registry."""
        metadata = self._access.forwarded_metadata(token)
        return await self._try_replicas(lambda session, _: session.register(name, source, metadata))

    async def connect(self, avoid: Collection[str] = ()) -> ReplicaSession:
        """Returns a session with one replica, without a call to it. Raises nothing."""
        await self._close_unused()
        return self._session(self._replicas.order(self._key, avoid)[0])

    async def probe(self, endpoint: Endpoint) -> bool:
        """Returns whether a replica reports that it serves. Health checks need no token."""
        await self._close_unused()
        pooled = self._channels.acquire(endpoint)
        check = health_pb2_grpc.HealthStub(pooled.channel).Check
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return True  # it is up, and has no health service
            self._channels.retire(pooled)
            return False
        finally:
            self._channels.release(pooled)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _try_replicas(self, call: Callable[[ReplicaSession, float], Awaitable[T]]) -> T:
        """Makes `call` to one replica after the other until one answers; passes it the timeout.
        Logs once per outage that none does: callers are told that this server's log has more."""
        await self._close_unused()
        *others, last = self._replicas.order(self._key)
        for endpoint in others:
            try:
                answer = await call(self._session(endpoint), FAILOVER_SECONDS)
                self._is_down = False
                return answer
            except StoreUnavailable:
                self._replicas.count_failover()
        try:
            answer = await call(self._session(last), CALL_SECONDS)
        except StoreUnavailable as error:
            if not self._is_down:
                facts = {"source": last.address, "notes": notes_of(error)}
                logger.warning("a call to the store failed: %s", error.message, extra=facts)
            self._is_down = True
            raise
        self._is_down = False
        return answer

    def _session(self, endpoint: Endpoint) -> ReplicaSession:
        return ReplicaSession(self._channels, endpoint, self._access)

    async def _close_unused(self) -> None:
        for channel in self._channels.pop_unused():
            await channel.close()


class ReplicaSession:
    """One replica's catalog. Every method raises StoreUnavailable when it does not answer."""

    def __init__(self, channels: ChannelPool, endpoint: Endpoint, access: StoreAccess) -> None:
        self.source = endpoint.address
        self._channels = channels
        self._endpoint = endpoint
        self._access = access

    async def get_adapter(
        self, ref: str, tenants: Collection[str] = (), timeout_s: float = CALL_SECONDS
    ) -> AdapterRecord:
        """Raises AdapterNotFound."""
        request = pb.GetAdapterRequest(ref=ref, tenants=sorted(tenants))
        response = await self._call("GetAdapter", request, timeout_s)
        return to_record(response.adapter, response.revision)

    async def get_text(self, digest: str, timeout_s: float) -> bytes:
        """Raises AdapterNotFound, and CorruptImage for content of another digest."""
        response = await self._call("GetText", pb.GetTextRequest(digest=digest), timeout_s)
        if digest != f"sha256:{hashlib.sha256(response.content).hexdigest()}":
            raise CorruptImage(f"the store sent a text for {digest} that has another digest")
        return bytes(response.content)

    async def list_adapters(
        self, tenants: Collection[str], page_size: int, page_token: str, timeout_s: float
    ) -> AdapterPage:
        """Raises InvalidArgument for a token of another list."""
        request = pb.ListAdaptersRequest(
            page_size=page_size, page_token=page_token, tenants=sorted(tenants)
        )
        response = await self._call("ListAdapters", request, timeout_s)
        records = [to_record(adapter, response.revision) for adapter in response.adapters]
        return AdapterPage(records, response.next_page_token)

    async def register(self, name: str, source: Source, metadata: Metadata) -> Registered:
        """Sends the caller's own `metadata`: the store's refusals are no sign of its health.
        Raises the store's refusal, or the error of a failed call."""
        pooled = self._channels.acquire(self._endpoint)
        request = pb.RegisterAdapterRequest(
            name=name,
            source_uri=source.uri,
            base_model=source.base_model,
            default_base_model=source.default_base_model,
            expected_digest=source.expected_digest,
        )
        try:
            response = await pooled.stub.RegisterAdapter(
                request, timeout=REGISTER_SECONDS, metadata=(*metadata, *outgoing_headers())
            )
        except grpc.RpcError as error:
            forwarded = to_forwarded_error(error)
            if forwarded is not None:
                raise forwarded from error
            self._channels.report_failure(pooled, error.code())
            raise to_error(error) from error
        finally:
            self._channels.release(pooled)
        self._channels.report_success(pooled)
        return Registered(
            response.revision,
            response.adapter.base_model,
            response.base_model_reason,
            tuple(response.ignored_config_keys),
            tuple(response.warnings),
        )

    async def get_revision(self) -> int:
        """Returns the catalog's current revision."""
        status = await self._call("GetStoreStatus", pb.GetStoreStatusRequest())
        return int(status.revision)

    async def register_layout(
        self, layout: ModelLayout, announcement: Announcement
    ) -> AcceptedLayout:
        """Raises AdapterUnusable when we share no image format."""
        try:
            response = await self._call("RegisterLayout", from_registration(layout, announcement))
        except (InvalidArgument, AdapterUnusable) as error:
            if layout.adapter_dtype is not None and knows_no_float8(error):
                raise AdapterUnusable(
                    f"the store is of a release that has no float8 adapters: upgrade it, or leave "
                    f"out --adapter-dtype fp8 ({error.message})",
                    subject="adapter_dtype",
                ) from error
            if not (layout.vectors and knows_no_vectors(error)):
                raise
            request = from_registration(layout, announcement, to_earlier=True)
            response = await self._call("RegisterLayout", request)
        return AcceptedLayout(response.layout_id, response.announcement_id)

    async def watch(
        self, since_revision: int, announcement_id: str = ""
    ) -> AsyncIterator[NameEvent]:
        """Yields changes of names after a revision, and bookmarks. Raises HistoryGone, and
        StoreUnavailable also if the announcement is not known any more."""
        pooled = self._channels.acquire(self._endpoint)
        request = pb.WatchAdaptersRequest(
            since_revision=since_revision, announcement_id=announcement_id
        )
        call = pooled.stub.WatchAdapters(request, metadata=self._access.metadata())
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    response = await call.read()
                if response is grpc.aio.EOF:
                    raise StoreUnavailable("the store ended the watch")
                self._channels.report_success(pooled)
                yield to_event(response.event)
        except TimeoutError:
            self._channels.report_failure(pooled, grpc.StatusCode.DEADLINE_EXCEEDED)
            raise StoreUnavailable("the store's watch has fallen silent") from None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                raise HistoryGone from error
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise StoreUnavailable("the store has forgotten this server's layout") from error
            self._channels.report_failure(pooled, error.code())
            raise to_error(error) from error
        finally:
            call.cancel()
            self._channels.release(pooled)

    async def _call(self, method: str, request: Any, timeout_s: float = CALL_SECONDS) -> Any:
        pooled = self._channels.acquire(self._endpoint)
        call = getattr(pooled.stub, method)
        metadata = (*self._access.metadata(), *outgoing_headers())
        try:
            response = await call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            self._channels.report_failure(pooled, error.code())
            raise to_error(error) from error
        finally:
            self._channels.release(pooled)
        self._channels.report_success(pooled)
        return response


class ImageClient:
    """The AdapterStore of pull threads: channels of its own, blocking iterators."""

    def __init__(
        self,
        replicas: Replicas,
        access: StoreAccess = NO_ACCESS,
        share_socket: Path | None = None,
    ) -> None:
        self._replicas = replicas
        self._access = access
        self._channels = ChannelPool(grpc, replicas, access)
        self._socket = None
        if share_socket is not None:
            self._socket = ShareSocket(share_socket, replicas.count_share)

    def close(self) -> None:
        for channel in self._channels.pop_all():
            channel.close()

    def pull(
        self,
        digest: str,
        layout_id: str,
        offset: int = 0,
        image_id: str = "",
        avoid: Collection[str] = (),
    ) -> PullStream:
        for channel in self._channels.pop_unused():
            channel.close()
        chosen, *others = self._replicas.order(digest, avoid)
        if avoid and chosen.address not in avoid:
            self._replicas.count_failover()
        request = pb.PullAdapterRequest(
            digest=digest, layout_id=layout_id, offset=offset, image_id=image_id
        )
        metadata = (*self._access.metadata(), *outgoing_headers())
        pooled = self._channels.acquire(chosen)

        def start(share_id: bytes) -> Any:
            self._channels.hold(pooled)
            request.share_id, request.wants_ends = share_id, bool(share_id)
            call = pooled.pull(request, metadata=metadata)
            call.add_done_callback(lambda _: self._channels.release(pooled))
            return call

        call = PullCall(start, self._socket, can_share=offset == 0)
        self._channels.release(pooled)
        is_last = all(other.address in avoid for other in others)
        return _ImageStream(self._replicas, self._channels, pooled, call, layout_id, is_last)


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
        """Raises AdapterNotFound."""
        raise AdapterNotFound("this server has no adapter store", subject="adapter")


class _ImageStream:
    """`is_last`: no other replica is left to try."""

    def __init__(
        self,
        replicas: Replicas,
        channels: ChannelPool,
        pooled: PooledChannel,
        call: PullCall,
        layout_id: str,
        is_last: bool,
    ) -> None:
        self.source = pooled.endpoint.address
        self._replicas = replicas
        self._channels = channels
        self._pooled = pooled
        self._call = call
        self._layout_id = layout_id
        self._is_last = is_last

    @property
    def mapped(self) -> MappedImage | None:
        return self._call.mapped

    def __iter__(self) -> Generator[PullMessage]:
        num_bytes, result = 0, "cancelled"
        try:
            for message in self._call.messages():
                if isinstance(message, ImageHeader):
                    self._channels.report_success(self._pooled)
                elif isinstance(message, ImageChunk):
                    num_bytes += len(message.data)
                elif isinstance(message, LayerEnd) and self.mapped is not None:
                    num_bytes = message.end_offset
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

    def _to_error(self, error: grpc.RpcError) -> ServiceError:
        self._channels.report_failure(self._pooled, error.code())
        if is_about(error, self._layout_id):
            # A store that lost our layout gets it again when the watch reconnects.
            return StoreUnavailable(
                "the adapter store does not know the model that this server runs"
            )
        if error.code() is grpc.StatusCode.NOT_FOUND and not self._is_last:
            return StoreUnavailable("a replica of the adapter store does not know the adapter")
        return to_error(error)


# --- in the engine's process --------------------------------------------------------------------


class RemoteImages(ImageClient):
    """Has replicas of its own, which exchange their findings with the main process's."""

    def __init__(
        self,
        replicas: Replicas,
        access: StoreAccess,
        publish: Callable[[Any], None],
        share_socket: Path | None = None,
    ) -> None:
        super().__init__(replicas, access, share_socket)
        replicas.publish_to(publish)
        self.on_update = replicas.on_update


class RemoteNoStore(NoStore):
    def on_update(self, content: Any) -> None:
        raise AssertionError("there are no replicas to update")


@dataclass(frozen=True, slots=True)
class ImageClientRecipe:
    """Makes the client in the engine's process, from the settings, and configures logging there.
    Pickles; see `engine.transport.process_main.StoreFactory`."""

    config: InferenceSettings

    def __call__(self, publish: Callable[[Any], None]) -> RemoteImages | RemoteNoStore:
        configure_logging(self.config.log_format, self.config.log_level)
        if not self.config.store:
            return RemoteNoStore()
        replicas = Replicas.at(*self.config.store_addresses)
        access = read_store_access(self.config)
        return RemoteImages(replicas, access, publish, self.config.store_share_socket)
