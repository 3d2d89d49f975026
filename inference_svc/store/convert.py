"""The store's messages and statuses, and what we make of them."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from inference_svc.adapters.image_source import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    Segment,
)
from inference_svc.adapters.layout import LayoutTarget, ModelLayout
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnusable,
    CorruptImage,
    InferenceError,
    InvalidRequest,
    NoRoom,
    PermissionDenied,
    QueueFull,
    StoreUnavailable,
    Unauthenticated,
)
from inference_svc.store.directory import NameEvent
from inference_svc.store.name_cache import AdapterRecord, LayoutVerdict
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

ERRORS: dict[grpc.StatusCode, type[InferenceError]] = {
    grpc.StatusCode.NOT_FOUND: AdapterNotFound,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: AdapterUnusable,
    grpc.StatusCode.DATA_LOSS: CorruptImage,
}
"""What the store answers; every other code means that it cannot be reached, for now."""

REFUSALS_OF_CALLERS = ERRORS | {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.ABORTED: AdapterUnusable,
}
"""What it answers to a caller of ours, for whom we asked."""

REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""It answers, but not to us: the token is to be mended, and callers can only wait."""


OUT_OF_ORDER = (
    *REFUSALS,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""What says that a replica serves nobody, or not us, rather than not this adapter."""

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


def to_error(error: grpc.RpcError) -> InferenceError:
    """Addresses and other details of a lost connection are notes: for our log, not for callers."""
    kind = ERRORS.get(error.code())
    if kind is not None:
        return kind(error.details(), subject="adapter")
    does = "refuses this server" if error.code() in REFUSALS else "does not answer"
    unavailable = StoreUnavailable(f"the adapter store {does} ({error.code().name})")
    unavailable.add_note(error.details() or "")
    return unavailable


def to_refusal(error: grpc.RpcError) -> InferenceError | None:
    """What the store said to a caller of ours; None: no store has answered, or its answer is
    broken."""
    info, violations, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    try:
        status = rpc_status.from_call(error)
        if status is None:
            return None
        for detail in status.details:
            for wanted in (info, violations, retry):
                detail.Unpack(wanted)
    except (DecodeError, ValueError):
        return None
    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    kind = REFUSALS_OF_CALLERS.get(error.code(), StoreUnavailable)
    if kind is QueueFull and not retry_after_s:
        kind = NoRoom  # waiting does not help
    fields = [violation.field for violation in violations.field_violations]
    subject = fields[0] if fields else info.metadata.get("subject", "")
    message = f"the adapter store: {status.message}"
    return kind(message, subject=subject, retry_after_s=retry_after_s)


def is_about(error: grpc.RpcError, subject: str) -> bool:
    """Whether the store names `subject` as what is wrong."""
    status = rpc_status.from_call(error)
    return status is not None and any(subject.encode() in detail.value for detail in status.details)


def to_event(event: pb.AdapterEvent) -> NameEvent:
    if event.kind in _NO_CHANGE:
        return NameEvent(event.revision)
    return NameEvent(event.revision, event.name, event.digest)


def to_record(adapter: pb.Adapter, revision: int) -> AdapterRecord:
    """`revision` is the catalog's when the store said so."""
    return AdapterRecord(
        name=adapter.name,
        version=adapter.version,
        digest=adapter.digest,
        rank=adapter.rank,
        base_model=adapter.base_model,
        revision=revision,
        verdicts={
            state.layout_id: LayoutVerdict(state.state != pb.IMAGE_STATE_INCOMPATIBLE, state.reason)
            for state in adapter.layout_states
        },
        create_time_s=adapter.create_time.ToMicroseconds() / 1e6,
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


def to_pull_message(data: bytes) -> PullMessage:
    """A serialized PullAdapterResponse. The bytes of a chunk stay where they were received: the
    parser would copy them twice, which costs a pull a fifth of its time.

    Raises CorruptImage for what is none.
    """
    chunk = _to_chunk(data)
    if chunk is not None:
        return chunk
    try:
        response = pb.PullAdapterResponse.FromString(data)
    except DecodeError:
        raise CorruptImage("the store sent what is no message of a pull") from None
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


def _to_chunk(data: bytes) -> ImageChunk | None:
    """A chunk as stores write it: the offset, if it is not 0, then the data, and nothing else.
    None for all else, which is for the parser."""
    if not data.startswith(_CHUNK_TAG):
        return None
    try:
        length, at = _varint(data, len(_CHUNK_TAG))
        offset, end = 0, at + length
        if data.startswith(_OFFSET_TAG, at):
            offset, at = _varint(data, at + len(_OFFSET_TAG))
        if not data.startswith(_DATA_TAG, at):
            return None
        length, at = _varint(data, at + len(_DATA_TAG))
    except IndexError:
        return None
    is_whole = at + length == end == len(data)
    return ImageChunk(offset, memoryview(data)[at:]) if is_whole else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number below 2^63 at `at`, as Protocol Buffers write it, and where it ends. Raises
    IndexError."""
    value, shift = 0, 0
    while data[at] & 0x80:
        if shift == 56:
            raise IndexError
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def _tag(message: type[Message], field: str, wire_type: int) -> bytes:
    """Of a field with a number below 16."""
    return bytes([message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type])


_CHUNK_TAG = _tag(pb.PullAdapterResponse, "chunk", 2)
_OFFSET_TAG = _tag(pb.ImageChunk, "offset", 0)
_DATA_TAG = _tag(pb.ImageChunk, "data", 2)


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
