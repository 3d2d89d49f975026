"""Converts between the contract's messages and the store's own types. Pure functions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from typing import TypeVar

from google.protobuf.json_format import Parse, ParseError
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from adapter_store.catalog.tables.lookup import VersionsPage
from adapter_store.core import (
    AdapterEvent,
    AdapterRecord,
    Announcement,
    BaseModelSource,
    EventKind,
    ImageKey,
    ImageState,
    LayoutInfo,
    LayoutVerdict,
    Part,
    Recorded,
    ServerLimits,
    SignatureState,
)
from adapter_store.images.plan.layout import refused_layout
from adapter_store.images.tiers.disk_tier import TierCounts
from adapter_store.registration.registrar import Registration
from adapter_store.registration.signatures import Signature
from adapter_store.sources.upload import FileChunk
from contract.images.layouts import InvalidLayout, Layout
from contract.images.segment_kinds import FURTHER_KINDS, LORA_KINDS, SegmentKind
from contract.protobuf import (
    SEGMENT_KIND_NUMBERS,
    SEGMENT_KINDS,
    read_layout,
)
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import InvalidArgument
from servicekit.refs import (
    DEFAULT_TENANT,
    AdapterName,
    AdapterRef,
    parse_name,
    parse_ref,
    parse_sha256,
)

V = TypeVar("V")
Registered = TypeVar("Registered", pb.RegisterAdapterResponse, pb.UploadAdapterResponse)

_STATES = {
    ImageState.PENDING: pb.IMAGE_STATE_PENDING,
    ImageState.COMPILING: pb.IMAGE_STATE_COMPILING,
    ImageState.READY: pb.IMAGE_STATE_READY,
    ImageState.INCOMPATIBLE: pb.IMAGE_STATE_INCOMPATIBLE,
}
_BASE_MODEL_SOURCES = {
    BaseModelSource.CALLER: pb.BASE_MODEL_SOURCE_CALLER,
    BaseModelSource.CURRENT_VERSION: pb.BASE_MODEL_SOURCE_CURRENT_VERSION,
    BaseModelSource.SERVED: pb.BASE_MODEL_SOURCE_SERVED,
    BaseModelSource.CONFIG: pb.BASE_MODEL_SOURCE_CONFIG,
    BaseModelSource.DEFAULT: pb.BASE_MODEL_SOURCE_DEFAULT,
    BaseModelSource.ONLY_SERVED: pb.BASE_MODEL_SOURCE_ONLY_SERVED,
}
_EVENT_KINDS = {
    EventKind.REGISTERED: pb.EVENT_KIND_REGISTERED,
    EventKind.UPDATED: pb.EVENT_KIND_UPDATED,
    EventKind.DELETED: pb.EVENT_KIND_DELETED,
    EventKind.PINNED: pb.EVENT_KIND_PINNED,
    EventKind.UNPINNED: pb.EVENT_KIND_UNPINNED,
    EventKind.BOOKMARK: pb.EVENT_KIND_BOOKMARK,
}
_SIGNATURE_STATES = {
    SignatureState.UNSIGNED: pb.SIGNATURE_STATE_UNSIGNED,
    SignatureState.VERIFIED: pb.SIGNATURE_STATE_VERIFIED,
}


def from_registration(
    message: pb.RegisterAdapterRequest | pb.UploadMeta, home: str = DEFAULT_TENANT
) -> Registration:
    """Returns the registration; a name without a tenant is of tenant `home`. Raises
    InvalidArgument naming the field."""
    default = message.default_base_model if isinstance(message, pb.RegisterAdapterRequest) else ""
    return Registration(
        name=parse_name(message.name, home=home),
        base_model=message.base_model,
        default_base_model=default,
        expected_digest=_optional_digest(message.expected_digest, "expected_digest"),
        if_current_digest=_optional_digest(message.if_current_digest, "if_current_digest"),
        pinned=message.pinned,
        labels=dict(message.labels),
        description=message.description,
        signature=_from_signature(message.signature) if message.HasField("signature") else None,
        keep=message.keep,
        ephemeral=message.ephemeral if isinstance(message, pb.UploadMeta) else False,
        ttl_seconds=message.ttl_seconds,
    )


def _from_signature(message: pb.Signature) -> Signature:
    return Signature(message.key_id, message.value)


def from_ref(
    message: pb.GetAdapterRequest
    | pb.PinAdapterRequest
    | pb.UnpinAdapterRequest
    | pb.ExportAdapterRequest,
    home: str,
) -> AdapterRef:
    """Returns the reference; a name without a tenant is of tenant `home`. Raises
    InvalidArgument."""
    return parse_ref(message.ref, home=home)


def from_name(message: pb.DeleteAdapterRequest | pb.ListVersionsRequest, home: str) -> AdapterName:
    """Returns the name; one without a tenant is of tenant `home`. Raises InvalidArgument."""
    return parse_name(message.name, home=home)


def from_pull(message: pb.PullAdapterRequest) -> ImageKey:
    """Raises InvalidArgument naming the field."""
    digest = parse_sha256(message.digest, "digest")
    return ImageKey(digest, parse_sha256(message.layout_id, "layout_id"))


def from_text_request(message: pb.GetTextRequest) -> str:
    """Raises InvalidArgument."""
    return parse_sha256(message.digest, "digest")


def from_rollback(
    message: pb.RollbackAdapterRequest, home: str = DEFAULT_TENANT
) -> tuple[AdapterName, int, str]:
    """Returns the name, the version, and the digest that the name must point to now. Raises
    InvalidArgument."""
    name = parse_name(message.name, home=home)
    if message.version == 0:
        raise InvalidArgument("version: which one is to be current?", subject="version")
    required = _optional_digest(message.if_current_digest, "if_current_digest")
    return name, message.version, required


def from_prune(
    message: pb.PruneVersionsRequest, home: str = DEFAULT_TENANT
) -> tuple[AdapterName, int]:
    """Returns the name, and how many of its versions stay. Raises InvalidArgument."""
    name = parse_name(message.name, home=home)
    if message.keep == 0:
        raise InvalidArgument(
            "keep: how many versions are to stay? DeleteAdapter deletes all", subject="keep"
        )
    return name, message.keep


async def from_upload(
    requests: AsyncIterator[pb.UploadAdapterRequest | FileChunk], home: str = DEFAULT_TENANT
) -> tuple[Registration, AsyncIterator[FileChunk]]:
    """Returns the registration in the first message, and the chunks as they arrive. Raises
    InvalidArgument."""
    async for request in requests:
        if isinstance(request, FileChunk) or request.WhichOneof("part") != "meta":
            break
        return from_registration(request.meta, home), _from_chunks(requests)
    raise InvalidArgument("part: an upload starts with its meta", subject="part")


async def _from_chunks(
    requests: AsyncIterator[pb.UploadAdapterRequest | FileChunk],
) -> AsyncIterator[FileChunk]:
    async for request in requests:
        if isinstance(request, FileChunk):  # `read_chunk` has read it
            yield request
            continue
        if request.WhichOneof("part") != "chunk":
            raise InvalidArgument("part: after the meta only chunks may follow", subject="part")
        chunk = request.chunk
        yield FileChunk(chunk.file_name, chunk.offset, chunk.data)


_CHUNK = pb.UploadAdapterRequest.DESCRIPTOR.fields_by_name["chunk"].number << 3 | 2
_DATA = pb.FileChunk.DESCRIPTOR.fields_by_name["data"].number << 3 | 2
_MAX_HEAD_BYTES = 512
"""How far into a message its data begin, at most: tags, lengths, the offset, and a file's name."""
_MAX_LENGTH_BYTES = 5


def read_chunk(raw: bytes) -> FileChunk | None:
    """Returns the chunk of a serialized UploadAdapterRequest, its data a view of `raw`. None unless
    it has a chunk alone whose last field is its data, as clients write it: then protobuf reads it,
    and reports the fault. Takes no longer for a longer one.

    The encoding is https://protobuf.dev/programming-guides/encoding: a chunk is
    tag, length, {tag, length, file name; tag, offset; tag, length, data}."""
    if not raw or raw[0] != _CHUNK:
        return None
    length, start = _read_length(raw, 1)
    if start + length != len(raw):
        return None
    place = raw.find(_DATA.to_bytes(1, "little"), start, start + _MAX_HEAD_BYTES)
    while place >= 0:
        num_bytes, data_start = _read_length(raw, place + 1)
        if data_start + num_bytes == len(raw):
            head = _read_head(raw[start:place])
            if head is not None:
                return FileChunk(head.file_name, head.offset, memoryview(raw)[data_start:])
        place = raw.find(_DATA.to_bytes(1, "little"), place + 1, start + _MAX_HEAD_BYTES)
    return None


def _read_head(raw: bytes) -> pb.FileChunk | None:
    """Returns the part before the data; None if that is no whole message, or has data, too."""
    try:
        head = pb.FileChunk.FromString(raw)
    except DecodeError:
        return None
    return None if head.data else head


def _read_length(raw: bytes, place: int) -> tuple[int, int]:
    """Returns the number that begins at a place, and where it ends; (0, 0) if there is none."""
    value = 0
    for index in range(_MAX_LENGTH_BYTES):
        if place + index >= len(raw):
            return 0, 0
        byte = raw[place + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, place + index + 1
    return 0, 0


def from_layout(message: pb.ModelLayout) -> Layout:
    """Returns the layout, its image format not chosen yet (0). Raises InvalidArgument naming the
    field."""
    try:
        return read_layout(message)
    except InvalidLayout as error:
        raise refused_layout(error) from error


def from_json(text: str) -> tuple[Layout, Announcement]:
    """Returns a server's description in a RegisterLayoutRequest, as JSON. Raises
    InvalidArgument."""
    try:
        message = Parse(text, pb.RegisterLayoutRequest())
    except ParseError as error:
        raise InvalidArgument(f"server: {error}", subject="server") from error
    return from_layout(message.layout), from_announcement(message)


def from_announcement(message: pb.RegisterLayoutRequest) -> Announcement:
    """Returns the server's announcement beside its layout; for a server of an earlier release, its
    layout's. Raises InvalidArgument naming the field."""
    if not message.HasField("announcement"):
        return Announcement(tuple(message.layout.aliases), is_renewed=False)
    announcement = message.announcement
    return Announcement(
        tuple(announcement.aliases),
        announcement.max_rank,
        segment_kinds=tuple(_from_kinds(announcement.segment_kinds)),
        lora_targets=tuple(announcement.lora_targets),
        max_added_tokens=announcement.max_added_tokens,
        applies_invocation_tokens=announcement.applies_invocation_tokens,
        weight_form=announcement.weight_form,
        part=Part(
            announcement.num_ranks,
            announcement.rank_index,
            _optional_digest(
                announcement.first_announcement_id, "announcement.first_announcement_id"
            ),
        ),
    )


def _from_kinds(numbers: Sequence[int]) -> Iterator[SegmentKind]:
    """Yields the kinds beside A and B, which no server does without. Kinds of later releases are
    passed over: no image of this store has them."""
    field = "announcement.segment_kinds"
    found = {SEGMENT_KINDS.get(number) for number in numbers}
    for index, number in enumerate(numbers):
        if number == pb.SEGMENT_KIND_UNSPECIFIED:
            raise InvalidArgument(
                f"{field}[{index}]: its kind is missing", subject=f"{field}[{index}]"
            )
    if numbers and not found.issuperset(LORA_KINDS):
        raise InvalidArgument(f"{field}: a server that names any applies A and B", subject=field)
    yield from (kind for kind in FURTHER_KINDS if kind in found)


def from_watch(message: pb.WatchAdaptersRequest) -> str:
    """Returns the announcement that the watch renews, "" for none. Raises InvalidArgument."""
    return _optional_digest(message.announcement_id, "announcement_id")


def from_layout_page(message: pb.ListLayoutsRequest) -> str:
    """Returns the id of the layout that the page is after, "" for the first. Raises
    InvalidArgument."""
    return _optional_digest(message.page_token, "page_token")


def from_forget_layout(message: pb.ForgetLayoutRequest) -> str:
    """Raises InvalidArgument."""
    return parse_sha256(message.layout_id, "layout_id")


def _optional_digest(text: str, field: str) -> str:
    return parse_sha256(text, field) if text else ""


def to_registered(recorded: Recorded, kind: type[Registered]) -> Registered:
    """Returns the answer of this kind to a registration."""
    chosen = recorded.base_model
    assert chosen is not None
    return kind(
        adapter=to_adapter(recorded.record),
        revision=recorded.revision,
        deleted_versions=recorded.deleted_versions,
        base_model_source=_BASE_MODEL_SOURCES[chosen.source],
        base_model_reason=chosen.reason,
        ignored_config_keys=recorded.ignored_config_keys,
        warnings=recorded.warnings,
    )


def to_adapter(record: AdapterRecord) -> pb.Adapter:
    return pb.Adapter(
        name=str(record.name),
        version=record.version,
        digest=record.digest,
        source_uri=record.source_uri,
        base_model=record.base_model,
        rank=record.rank,
        targets=record.targets,
        source_bytes=record.source_bytes,
        labels=record.labels,
        create_time=_to_timestamp(record.create_time),
        update_time=_to_timestamp(record.update_time),
        pinned=record.pinned,
        layout_states=[_to_layout_state(verdict, record) for verdict in record.verdicts],
        description=record.description,
        created_by=record.created_by,
        source_revision=record.source_revision,
        config_base_model=record.config_base_model,
        files=[
            pb.SourceFile(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256)
            for file in record.files
        ],
        signature_state=_SIGNATURE_STATES[record.signature_state],
        signed_by=record.signed_by,
        delete_time=_to_timestamp(record.delete_time) if record.delete_time else None,
        segment_kinds=sorted(SEGMENT_KIND_NUMBERS[kind] for kind in record.segment_kinds),
        added_tokens=record.added_tokens,
        invocation_tokens=record.invocation_tokens,
        tokenizer_digest=record.tokenizer_digest,
        chat_template_digest=record.chat_template_digest,
        class_labels=record.class_labels,
        ephemeral=record.ephemeral,
        expire_time=_to_timestamp(record.expire_time) if record.expire_time else None,
    )


def _to_layout_state(verdict: LayoutVerdict, record: AdapterRecord) -> pb.LayoutState:
    return pb.LayoutState(
        layout_id=verdict.layout_id,
        state=_STATES[verdict.state],
        reason=verdict.reason,
        image_bytes=verdict.image_bytes,
        servers=[_to_server_verdict(limits, verdict, record) for limits in verdict.servers],
        fits=verdict.fits,
        unused_spaces=verdict.unused_spaces,
    )


def _to_server_verdict(
    limits: ServerLimits, verdict: LayoutVerdict, record: AdapterRecord
) -> pb.ServerVerdict:
    reason = limits.refusal(record, verdict)
    return pb.ServerVerdict(
        announcement_id=limits.announcement_id,
        max_rank=limits.max_rank,
        servable=not reason,
        reason=reason,
        note="" if reason else limits.note(record.config_base_model),
        **limits.part._asdict(),
    )


def to_page(records: list[AdapterRecord], token: str, revision: int) -> pb.ListAdaptersResponse:
    return pb.ListAdaptersResponse(
        adapters=map(to_adapter, records), next_page_token=token, revision=revision
    )


def to_versions(page: VersionsPage) -> pb.ListVersionsResponse:
    return pb.ListVersionsResponse(
        adapters=map(to_adapter, page.records),
        next_page_token=page.next_page_token,
        current_version=page.current_version,
        revision=page.revision,
    )


def to_layout_info(layout: LayoutInfo) -> pb.LayoutInfo:
    return pb.LayoutInfo(
        layout_id=layout.layout_id,
        base_model=layout.base_model,
        aliases=layout.aliases,
        max_ranks=layout.max_ranks,
        images=layout.num_images,
        image_bytes=layout.image_bytes,
        create_time=_to_timestamp(layout.create_time),
        last_use_time=_to_timestamp(layout.last_use_time),
        other_base_models=layout.other_base_models,
    )


def to_event(event: AdapterEvent) -> pb.WatchAdaptersResponse:
    return pb.WatchAdaptersResponse(
        event=pb.AdapterEvent(
            revision=event.revision,
            kind=_EVENT_KINDS[event.kind],
            name=event.name,
            version=event.version,
            digest=event.digest,
            time=_to_timestamp(event.time),
        )
    )


def to_tier_status(counts: TierCounts) -> pb.TierStatus:
    return pb.TierStatus(
        used_bytes=counts.used_bytes,
        capacity_bytes=counts.capacity_bytes,
        images=counts.images,
        hits=counts.hits,
        misses=counts.misses,
        evictions=counts.evictions,
    )


def _to_timestamp(time: datetime) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromDatetime(time)
    return timestamp
