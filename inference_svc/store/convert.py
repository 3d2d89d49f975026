"""Converts between the store's protobuf messages and statuses and our types and errors."""

from __future__ import annotations

from collections.abc import Collection

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from contract.images.header import ImageChunk, PullMessage
from contract.images.segment_kinds import LORA_KINDS, SegmentKind
from contract.protobuf import (
    SEGMENT_KIND_NUMBERS,
    SEGMENT_KINDS,
    read_header,
    read_layer_end,
    read_trailer,
    write_layout,
)
from inference_svc.adapters.layout import ModelLayout
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnusable,
    CorruptImage,
    NoRoom,
    QueueFull,
    StoreUnavailable,
)
from inference_svc.store.types import AdapterRecord, Announcement, LayoutVerdict, NameEvent
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import InvalidArgument, PermissionDenied, ServiceError, Unauthenticated
from servicekit.rpc.wire import Counter, Malformed, TooMany

ERRORS: dict[grpc.StatusCode, type[ServiceError]] = {
    grpc.StatusCode.NOT_FOUND: AdapterNotFound,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.FAILED_PRECONDITION: AdapterUnusable,
    grpc.StatusCode.DATA_LOSS: CorruptImage,
}
"""Answers of the store; every other code means that it is unreachable for now."""

FORWARDED_ERRORS = ERRORS | {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.ABORTED: AdapterUnusable,
}
"""Answers to a caller of ours, on whose behalf the store was called."""

AUTH_FAILURES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""The store answers, but not this server: its token is to be fixed, and callers can only wait."""


REPLICA_FAILURES = (
    *AUTH_FAILURES,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Codes of a replica that serves nobody, or not us, rather than not this adapter."""

_NO_CHANGE = (pb.EVENT_KIND_PINNED, pb.EVENT_KIND_UNPINNED, pb.EVENT_KIND_BOOKMARK)
"""Events after which every name points to the same content as before."""


def to_error(error: grpc.RpcError) -> ServiceError:
    """Returns our error for a call's. Addresses and other details of a lost connection become
    notes: they are for our log, not for callers."""
    kind = ERRORS.get(error.code())
    if kind is not None:
        return kind(error.details(), subject="adapter")
    does = "refuses this server" if error.code() in AUTH_FAILURES else "does not answer"
    unavailable = StoreUnavailable(f"the adapter store {does} ({error.code().name})")
    unavailable.add_note(error.details() or "")
    return unavailable


def to_forwarded_error(error: grpc.RpcError) -> ServiceError | None:
    """Returns the store's answer to a caller of ours; None if no store has answered, or with
    broken details."""
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
            for message in (info, violations, retry):
                detail.Unpack(message)
    except (DecodeError, ValueError):
        return None
    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    kind = FORWARDED_ERRORS.get(error.code(), StoreUnavailable)
    if kind is QueueFull and not retry_after_s:
        kind = NoRoom  # waiting does not help
    fields = [violation.field for violation in violations.field_violations]
    subject = fields[0] if fields else info.metadata.get("subject", "")
    text = f"the adapter store: {status.message}"
    return kind(text, subject=subject, retry_after_s=retry_after_s)


def is_about(error: grpc.RpcError, subject: str) -> bool:
    """Returns whether the status names `subject` as the culprit."""
    status = rpc_status.from_call(error)
    return status is not None and any(subject.encode() in detail.value for detail in status.details)


def knows_no_float8(error: ServiceError) -> bool:
    """Returns whether a store refuses a layout because it is of a release before image format 3."""
    return error.message.startswith("layout.image_formats: ") or knows_no_vectors(error)


def knows_no_vectors(error: ServiceError) -> bool:
    """Returns whether a store refuses a layout because it is of a release before image format 2."""
    return error.message.endswith(f".kind: {pb.TARGET_KIND_VECTOR} is not known")


def to_event(event: pb.AdapterEvent) -> NameEvent:
    if event.kind in _NO_CHANGE:
        return NameEvent(event.revision)
    if event.kind == pb.EVENT_KIND_DELETED:  # the digest is its former one
        return NameEvent(event.revision, event.name)
    return NameEvent(event.revision, event.name, event.digest, event.version)


def to_record(adapter: pb.Adapter, revision: int) -> AdapterRecord:
    """`revision` is the catalog's when the store answered."""
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
        targets=tuple(adapter.targets),
        segment_kinds=tuple(SEGMENT_KINDS.get(k, k) for k in adapter.segment_kinds),
        invocation_tokens=tuple(adapter.invocation_tokens),
        added_tokens=adapter.added_tokens,
        tokenizer_digest=adapter.tokenizer_digest,
        chat_template_digest=adapter.chat_template_digest,
        class_labels=tuple(adapter.class_labels),
    )


def from_registration(
    layout: ModelLayout, announcement: Announcement, *, to_earlier: bool = False
) -> pb.RegisterLayoutRequest:
    """`to_earlier`: to a store of before announcements and format 2."""
    message = from_layout(layout.of_format_1 if to_earlier else layout)
    if to_earlier:
        message.aliases.extend(announcement.aliases)
    return pb.RegisterLayoutRequest(layout=message, announcement=from_announcement(announcement))


def from_layout(layout: ModelLayout) -> pb.ModelLayout:
    announced, _ = layout.announced(layout.image_formats[-1])
    return write_layout(announced, layout.image_formats)


def from_announcement(announcement: Announcement) -> pb.Announcement:
    return pb.Announcement(
        aliases=announcement.aliases,
        max_rank=announcement.max_rank,
        lora_targets=announcement.lora_targets,
        applies_invocation_tokens=True,
        segment_kinds=_from_kinds(announcement.segment_kinds),
        max_added_tokens=announcement.max_added_tokens,
        weight_form=announcement.weight_form,
        num_ranks=announcement.num_ranks,
        rank_index=announcement.rank_index,
        first_announcement_id=announcement.first_announcement_id,
    )


def _from_kinds(kinds: Collection[SegmentKind]) -> list[pb.SegmentKind]:
    """Returns the kinds besides A and B, and these: a store refuses an announcement of some kinds
    without them."""
    applied = {*LORA_KINDS, *kinds} if kinds else ()
    return [number for kind, number in SEGMENT_KIND_NUMBERS.items() if kind in applied]


SMALL_BYTES = 256 << 10
"""Headers of dense models have at most 100 KB. The entries of larger ones are counted before they
are parsed, which takes hundreds of bytes of memory for two of the message."""
MAX_SEGMENTS = 1 << 18
MAX_DIMENSIONS = 4 * MAX_SEGMENTS
"""Bounds the shapes of all segments together."""
_counter = Counter(
    pb.PullAdapterResponse,
    {
        "header.segments": MAX_SEGMENTS,
        "header.segments.shape": MAX_DIMENSIONS,
        "header.ends": MAX_SEGMENTS,
    },
)


def to_pull_message(data: bytes) -> PullMessage:
    """Parses a serialized PullAdapterResponse. The bytes of a chunk stay where they were received:
    the parser would copy them twice, which costs a pull a fifth of its time.

    Raises CorruptImage for anything else.
    """
    chunk = _to_chunk(data)
    if chunk is not None:
        return chunk
    try:
        if len(data) > SMALL_BYTES:
            _counter.check(data)
        response = pb.PullAdapterResponse.FromString(data)
    except TooMany as error:
        raise CorruptImage(f"the store sent an image of {error}") from None
    except (Malformed, DecodeError):
        raise CorruptImage("the store sent a malformed pull message") from None
    part = response.WhichOneof("part")
    if part == "chunk":
        return ImageChunk(response.chunk.offset, response.chunk.data)
    if part == "layer_end":
        return read_layer_end(response.layer_end)
    if part == "trailer":
        return read_trailer(response.trailer)
    if part == "header":
        return read_header(response.header)
    raise CorruptImage("the store sent an unknown pull message")


def _to_chunk(data: bytes) -> ImageChunk | None:
    """Parses a chunk as stores write it: the offset, if it is not 0, then the data, and nothing
    else. Returns None for all else, which is for the parser."""
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
    is_complete = at + length == end == len(data)
    return ImageChunk(offset, memoryview(data)[at:]) if is_complete else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the varint (below 2^63) at `at` and the offset behind it. Raises IndexError."""
    value, shift = 0, 0
    while data[at] & 0x80:
        if shift == 56:
            raise IndexError
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def _tag(message: type[Message], field: str, wire_type: int) -> bytes:
    """Returns the tag of a field with a number below 16."""
    return bytes([message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type])


_CHUNK_TAG = _tag(pb.PullAdapterResponse, "chunk", 2)
_OFFSET_TAG = _tag(pb.ImageChunk, "offset", 0)
_DATA_TAG = _tag(pb.ImageChunk, "data", 2)
