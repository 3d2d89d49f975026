"""The adapter store over gRPC: its catalog for the event loop, its images for pull threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from grpc_status import rpc_status

from inference_svc.adapters.layout import LayoutTarget, ModelLayout
from inference_svc.adapters.store import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    PullStream,
    Segment,
)
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnusable,
    CorruptImage,
    InferenceError,
    InvalidRequest,
    StoreUnavailable,
)
from inference_svc.name_cache import AdapterRecord, LayoutVerdict
from inference_svc.names import NameEvent
from inference_svc.store_access import NO_ACCESS, StoreAccess
from inference_svc.store_link import HistoryGone
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc

ANSWER_SECONDS = 5.0
"""A store that takes longer for a question about its catalog counts as unreachable."""
SILENCE_SECONDS = 5.0
"""The watch speaks every second; silent for this long, its connection is taken for dead."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    # A store that comes back is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A machine that vanished without closing its connections is noticed while a pull waits.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # Bulk bytes and questions do not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)

ERRORS: dict[grpc.StatusCode, type[InferenceError]] = {
    grpc.StatusCode.NOT_FOUND: AdapterNotFound,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: AdapterUnusable,
    grpc.StatusCode.DATA_LOSS: CorruptImage,
}
"""What the store answers; every other code means that it cannot be reached, for now."""

_DTYPES = {
    "torch.float32": pb.DATA_TYPE_FLOAT32,
    "torch.float16": pb.DATA_TYPE_FLOAT16,
    "torch.bfloat16": pb.DATA_TYPE_BFLOAT16,
}
_TARGET_KINDS = {"linear": pb.TARGET_KIND_LINEAR, "embedding": pb.TARGET_KIND_EMBEDDING}
_SEGMENT_KINDS = {
    pb.SEGMENT_KIND_A: "a",
    pb.SEGMENT_KIND_B: "b",
    pb.SEGMENT_KIND_MAGNITUDE: "magnitude",
    pb.SEGMENT_KIND_BIAS: "bias",
}
_NO_CHANGE = (pb.EVENT_KIND_PINNED, pb.EVENT_KIND_UNPINNED, pb.EVENT_KIND_BOOKMARK)
"""Events after which every name points to what it did before."""


REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""It answers, but not to us: the token is to be mended, and callers can only wait."""


def open_channel(kind: Any, address: str, access: StoreAccess) -> Any:
    """`kind` is grpc or grpc.aio."""
    trusted = access.certificates
    if trusted is None:
        return kind.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(trusted.ca, trusted.key, trusted.chain)
    return kind.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


class CatalogClient:
    """Questions about names, the watch, and our layout. Lives on one event loop.

    Every method raises StoreUnavailable when the store does not answer.
    """

    def __init__(self, address: str, access: StoreAccess = NO_ACCESS) -> None:
        self._channel = open_channel(grpc.aio, address, access)
        self._access = access
        self._stub = pb_grpc.AdapterStoreServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def get_adapter(self, ref: str) -> AdapterRecord:
        """Raises AdapterNotFound."""
        response = await self._ask(self._stub.GetAdapter, pb.GetAdapterRequest(ref=ref))
        return to_record(response)

    async def get_revision(self) -> int:
        """The catalog's revision now."""
        status = await self._ask(self._stub.GetStoreStatus, pb.GetStoreStatusRequest())
        return int(status.revision)

    async def register_layout(self, layout: ModelLayout) -> str:
        """The layout's id. Raises AdapterUnusable when we share no image format."""
        request = pb.RegisterLayoutRequest(layout=from_layout(layout))
        response = await self._ask(self._stub.RegisterLayout, request)
        return str(response.layout_id)

    async def watch(self, since_revision: int) -> AsyncIterator[NameEvent]:
        """Changes of names after a revision, and bookmarks. Raises HistoryGone."""
        request = pb.WatchAdaptersRequest(since_revision=since_revision)
        call = self._stub.WatchAdapters(request, metadata=self._access.metadata())
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    response = await call.read()
                if response is grpc.aio.EOF:
                    raise StoreUnavailable("the store ended the watch")
                event = response.event
                yield NameEvent(event.revision, "" if event.kind in _NO_CHANGE else event.name)
        except TimeoutError:
            raise StoreUnavailable("the store's watch has fallen silent") from None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                raise HistoryGone from error
            raise to_error(error) from error
        finally:
            call.cancel()

    async def _ask(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=ANSWER_SECONDS, metadata=self._access.metadata())
        except grpc.RpcError as error:
            raise to_error(error) from error


class ImageClient:
    """The AdapterStore of pull threads: a channel of its own, blocking iterators."""

    def __init__(self, address: str, access: StoreAccess = NO_ACCESS) -> None:
        self._channel = open_channel(grpc, address, access)
        self._access = access
        self._stub = pb_grpc.AdapterStoreServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def pull(self, digest: str, layout_id: str, offset: int = 0, image_id: str = "") -> PullStream:
        request = pb.PullAdapterRequest(
            digest=digest, layout_id=layout_id, offset=offset, image_id=image_id
        )
        call = self._stub.PullAdapter(request, metadata=self._access.metadata())
        return _ImageStream(call, layout_id)


class NoStore:
    """The AdapterStore of a server without one; nothing resolves, so nothing is pulled."""

    def close(self) -> None:
        pass

    def pull(self, digest: str, layout_id: str, offset: int = 0, image_id: str = "") -> PullStream:
        raise AdapterNotFound("this server has no adapter store", subject="adapter")


class _ImageStream:
    def __init__(self, call: Any, layout_id: str) -> None:
        self._call = call
        self._layout_id = layout_id

    def __iter__(self) -> Iterator[PullMessage]:
        try:
            for response in self._call:
                yield to_pull_message(response)
        except grpc.RpcError as error:
            if is_about(error, self._layout_id):
                # A store that lost our layout hears of it again when the watch reconnects.
                raise StoreUnavailable("the store does not know our layout") from error
            raise to_error(error) from error
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        self._call.cancel()


# --- conversions --------------------------------------------------------------------------------


def to_error(error: grpc.RpcError) -> InferenceError:
    """Addresses and other details of a lost connection are notes: for our log, not for callers."""
    kind = ERRORS.get(error.code())
    if kind is not None:
        return kind(error.details(), subject="adapter")
    does = "refuses this server" if error.code() in REFUSALS else "does not answer"
    unavailable = StoreUnavailable(f"the adapter store {does} ({error.code().name})")
    unavailable.add_note(error.details() or "")
    return unavailable


def is_about(error: grpc.RpcError, subject: str) -> bool:
    """Whether the store names `subject` as what is wrong."""
    status = rpc_status.from_call(error)
    return status is not None and any(subject.encode() in detail.value for detail in status.details)


def to_record(response: pb.GetAdapterResponse) -> AdapterRecord:
    adapter = response.adapter
    return AdapterRecord(
        name=adapter.name,
        version=adapter.version,
        digest=adapter.digest,
        rank=adapter.rank,
        base_model=adapter.base_model,
        revision=response.revision,
        verdicts={
            state.layout_id: LayoutVerdict(state.state != pb.IMAGE_STATE_INCOMPATIBLE, state.reason)
            for state in adapter.layout_states
        },
    )


def from_layout(layout: ModelLayout) -> pb.ModelLayout:
    return pb.ModelLayout(
        base_model=layout.base_model,
        aliases=layout.aliases,
        config_sha256=layout.config_sha256,
        dtype=_DTYPES[str(layout.dtype)],
        targets=map(_from_target, layout.targets),
        image_formats=layout.image_formats,
    )


def _from_target(target: LayoutTarget) -> pb.Target:
    return pb.Target(
        name=target.name,
        layer=target.layer,
        group=target.group,
        kind=_TARGET_KINDS[target.kind],
        in_features=target.in_features,
        out_features=target.out_features,
    )


def to_pull_message(response: pb.PullAdapterResponse) -> PullMessage:
    part = response.WhichOneof("part")
    if part == "chunk":
        return ImageChunk(response.chunk.offset, response.chunk.data)
    if part == "layer_end":
        end = response.layer_end
        return LayerEnd(end.part, end.end_offset, end.sha256)
    if part == "trailer":
        return ImageTrailer(response.trailer.sha256)
    if part == "header":
        return _to_header(response.header)
    raise CorruptImage("the store sent a message that we do not know")


def _to_header(header: pb.ImageHeader) -> ImageHeader:
    return ImageHeader(
        image_id=header.image_id,
        digest=header.digest,
        layout_id=header.layout_id,
        image_format=header.image_format,
        total_bytes=header.total_bytes,
        segments=tuple(
            # An unknown kind fits no target, and is refused with the header.
            Segment(s.target, _SEGMENT_KINDS.get(s.kind, ""), s.rank, s.offset, s.length_bytes)
            for s in header.segments
        ),
        offset=header.offset,
    )
