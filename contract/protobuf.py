"""Reads the contract's types from protobuf messages, and writes them. The only module of the
contract that knows protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from contract.images.dtypes import DataType
from contract.images.header import ImageHeader, ImageTrailer, LayerEnd, Segment
from contract.images.layouts import InvalidLayout, Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Held, OtherName, Target, TargetKind
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

V = TypeVar("V")

SEGMENT_KINDS: Mapping[int, SegmentKind] = {
    number: SegmentKind[name.removeprefix("SEGMENT_KIND_")]
    for name, number in pb.SegmentKind.items()
    if number
}
SEGMENT_KIND_NUMBERS = {kind: cast(pb.SegmentKind, n) for n, kind in SEGMENT_KINDS.items()}
TARGET_KINDS: Mapping[int, TargetKind] = {
    number: TargetKind[name.removeprefix("TARGET_KIND_")]
    for name, number in pb.TargetKind.items()
    if number
}
TARGET_KIND_NUMBERS = {kind: cast(pb.TargetKind, n) for n, kind in TARGET_KINDS.items()}
DATA_TYPES: Mapping[int, DataType] = {
    number: DataType[name.removeprefix("DATA_TYPE_")]
    for name, number in pb.DataType.items()
    if number
}
DATA_TYPE_NUMBERS = {dtype: cast(pb.DataType, n) for n, dtype in DATA_TYPES.items()}
HELD: Mapping[int, Held] = {
    pb.HELD_UNSPECIFIED: Held.HERE,
    pb.HELD_HERE: Held.HERE,
    pb.HELD_ELSEWHERE: Held.ELSEWHERE,
    pb.HELD_UNUSED: Held.UNUSED,
}
HELD_NUMBERS = {
    Held.HERE: pb.HELD_UNSPECIFIED,
    Held.ELSEWHERE: pb.HELD_ELSEWHERE,
    Held.UNUSED: pb.HELD_UNUSED,
}


def write_layout(layout: Layout, image_formats: Sequence[int]) -> pb.ModelLayout:
    """Returns the message of a layout.

    Args:
        layout: The layout.
        image_formats: The formats that its server reads; the layout's own does not count.
    """
    return pb.ModelLayout(
        base_model=layout.base_model,
        config_sha256=layout.config_sha256,
        dtype=DATA_TYPE_NUMBERS[layout.dtype],
        targets=map(write_target, layout.targets),
        image_formats=image_formats,
        adapter_dtype=None
        if layout.adapter_dtype is None
        else DATA_TYPE_NUMBERS[layout.adapter_dtype],
    )


def write_target(target: Target) -> pb.Target:
    """Returns the message of a target."""
    return pb.Target(
        name=target.name,
        layer=target.layer,
        group=target.group,
        kind=TARGET_KIND_NUMBERS[target.kind],
        in_features=target.in_features,
        out_features=target.out_features,
        experts=target.experts if target.kind is TargetKind.EXPERTS else 0,
        in_slice=_write_slice(target.in_slice),
        out_slice=_write_slice(target.out_slice),
        other_names=map(_write_other_name, target.other_names),
        space=target.space,
        expert_slice=_write_slice(target.expert_slice),
        rank_part=_write_rank_part(target.rank_part),
        held=HELD_NUMBERS[target.held],
        base_hashes=target.base_hashes,
        base_dtype=None if target.base_dtype is None else DATA_TYPE_NUMBERS[target.base_dtype],
        tied_to=target.tied_to,
    )


def _write_slice(ends: tuple[int, int] | None) -> pb.Slice | None:
    return None if ends is None else pb.Slice(start=ends[0], end=ends[1])


def _write_rank_part(part: tuple[int, int] | None) -> pb.RankPart | None:
    return None if part is None else pb.RankPart(index=part[0], count=part[1])


def _write_other_name(other: OtherName) -> pb.OtherName:
    return pb.OtherName(
        name=other.name,
        outputs=_write_slice(other.outputs),
        block_sizes=other.block_sizes,
        block_part=other.block_part,
        transposed=other.transposed,
    )


def read_layout(message: pb.ModelLayout) -> Layout:
    """Returns the layout of a message, its image format not chosen yet (0).

    Raises:
        InvalidLayout: A kind or type is not known.
    """
    return Layout(
        base_model=message.base_model,
        config_sha256=message.config_sha256,
        dtype=_known(DATA_TYPES, message.dtype, "layout.dtype"),
        image_format=0,
        targets=tuple(_read_target(i, target) for i, target in enumerate(message.targets)),
        adapter_dtype=_known(DATA_TYPES, message.adapter_dtype, "layout.adapter_dtype")
        if message.adapter_dtype
        else None,
    )


def _read_target(index: int, message: pb.Target) -> Target:
    field = f"layout.targets[{index}]"
    dtype = None
    if message.base_dtype:
        dtype = _known(DATA_TYPES, message.base_dtype, f"{field}.base_dtype")
    return Target(
        name=message.name,
        layer=message.layer if message.HasField("layer") else None,
        group=message.group,
        kind=_known(TARGET_KINDS, message.kind, f"{field}.kind"),
        in_features=message.in_features,
        out_features=message.out_features,
        experts=message.experts or 1,
        in_slice=_read_slice(message, "in_slice"),
        out_slice=_read_slice(message, "out_slice"),
        other_names=tuple(map(_read_other_name, message.other_names)),
        space=message.space,
        expert_slice=_read_slice(message, "expert_slice"),
        rank_part=_read_rank_part(message),
        held=_known(HELD, message.held, f"{field}.held"),
        base_hashes=tuple(message.base_hashes),
        base_dtype=dtype,
        tied_to=message.tied_to,
    )


def _known(values: Mapping[int, V], number: int, field: str) -> V:
    if number not in values:
        raise InvalidLayout(field, f"{number} is not known")
    return values[number]


def _read_slice(message: pb.Target | pb.OtherName, field: str) -> tuple[int, int] | None:
    if not message.HasField(field):
        return None
    part = getattr(message, field)
    return part.start, part.end


def _read_rank_part(message: pb.Target) -> tuple[int, int] | None:
    if not message.HasField("rank_part"):
        return None
    return message.rank_part.index, message.rank_part.count


def _read_other_name(message: pb.OtherName) -> OtherName:
    return OtherName(
        name=message.name,
        outputs=_read_slice(message, "outputs"),
        block_sizes=tuple(message.block_sizes),
        block_part=message.block_part,
        transposed=message.transposed,
    )


def write_header(header: ImageHeader) -> pb.ImageHeader:
    """Returns the message of an image's header."""
    return pb.ImageHeader(
        image_id=header.image_id,
        digest=header.digest,
        layout_id=header.layout_id,
        image_format=header.image_format,
        total_bytes=header.total_bytes,
        segments=[_write_segment(segment, header.image_format) for segment in header.segments],
        offset=header.offset,
        share_ticket=header.share_ticket,
        not_shared=header.not_shared,
        ends=map(write_layer_end, header.ends),
        trailer=None if header.trailer is None else write_trailer(header.trailer),
    )


def write_layer_end(end: LayerEnd) -> pb.LayerEnd:
    return pb.LayerEnd(part=end.part, end_offset=end.end_offset, sha256=end.sha256)


def write_trailer(trailer: ImageTrailer) -> pb.ImageTrailer:
    return pb.ImageTrailer(sha256=trailer.sha256)


def _write_segment(segment: Segment, image_format: int) -> pb.Segment:
    message = pb.Segment(
        target=segment.target,
        kind=SEGMENT_KIND_NUMBERS[segment.kind],
        rank=segment.rank,
        offset=segment.offset,
        length_bytes=segment.length_bytes,
    )
    if image_format > 1:
        assert segment.dtype is not None
        message.dtype = DATA_TYPE_NUMBERS[segment.dtype]
        message.shape.extend(segment.shape)
        if segment.scale != 1.0:
            message.scale = segment.scale
    return message


def read_header(message: pb.ImageHeader) -> ImageHeader:
    """Returns the header of a message, which may break the rules of images."""
    return ImageHeader(
        image_id=message.image_id,
        digest=message.digest,
        layout_id=message.layout_id,
        image_format=message.image_format,
        total_bytes=message.total_bytes,
        segments=tuple(map(_read_segment, message.segments)),
        offset=message.offset,
        share_ticket=message.share_ticket,
        not_shared=message.not_shared,
        ends=tuple(map(read_layer_end, message.ends)),
        trailer=read_trailer(message.trailer) if message.HasField("trailer") else None,
    )


def read_layer_end(message: pb.LayerEnd) -> LayerEnd:
    return LayerEnd(message.part, message.end_offset, message.sha256)


def read_trailer(message: pb.ImageTrailer) -> ImageTrailer:
    return ImageTrailer(message.sha256)


def _read_segment(message: pb.Segment) -> Segment:
    # An unknown kind or type fits no target, and is refused with the header.
    return Segment(
        message.target,
        SEGMENT_KINDS.get(message.kind, SegmentKind.UNKNOWN),
        message.rank,
        message.offset,
        message.length_bytes,
        DATA_TYPES.get(message.dtype),
        tuple(message.shape),
        message.scale if message.HasField("scale") else 1.0,
    )
