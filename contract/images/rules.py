"""The rules of images. The store checks an image that it has planned, the inference service the
header of an image before it takes a byte of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

from contract.images.dtypes import FLOAT8, DataType
from contract.images.expert_index import INDEX_BYTES, index_bytes, read_ranks
from contract.images.header import MAX_SCALE, MIN_SCALE, ImageHeader, InvalidImage, Segment, align
from contract.images.layouts import Layout
from contract.images.segment_kinds import LORA_KINDS, ROW_KINDS, SHARED_KINDS, SegmentKind
from contract.images.targets import Held, Target, TargetKind

_A, _B, _FULL = SegmentKind.A, SegmentKind.B, SegmentKind.FULL
_VECTORS = (
    (),
    (SegmentKind.BIAS,),
    (SegmentKind.MAGNITUDE,),
    (SegmentKind.BIAS, SegmentKind.MAGNITUDE),
)
_COMPLETE = frozenset(
    (*lora, *replaced)
    for lora in ((), *((_A, _B, *vectors) for vectors in _VECTORS))
    for replaced in ((), (_FULL,), ROW_KINDS)
    if lora or replaced
)
"""The contents that an adapter may have for a matrix, in the order of an image."""
_FIXED_DTYPES = {
    SegmentKind.BIAS: DataType.FLOAT32,
    SegmentKind.MAGNITUDE: DataType.FLOAT32,
    SegmentKind.ROW_IDS: DataType.INT32,
}
"""The types of kinds that do not have the layout's."""


def validate(header: ImageHeader, layout: Layout) -> None:
    """Checks that an image consists of segments that the layout's targets may have, in order, each
    complete, aligned and within the image. From format 2 on a shared segment may lie where an
    earlier one lies.

    Args:
        header: The image's header.
        layout: A valid layout, with the image's format.

    Raises:
        InvalidImage: It does not.
    """
    if not header.segments and header.image_format == 1:
        raise InvalidImage("the image has no segments")
    _check_order(header.segments, layout)
    for index, found in groupby(header.segments, lambda segment: segment.target):
        own = list(found)
        _check_contents(layout.targets[index], own)
        _check_bias_scale(own)
    for segment in header.segments:
        _check_form(segment, layout)
    _check_places(header)


def _check_order(segments: Iterable[Segment], layout: Layout) -> None:
    previous = 0
    for segment in segments:
        if not previous <= segment.target < len(layout.targets):
            raise InvalidImage(f"segment at byte {segment.offset} does not fit the layout")
        previous = segment.target


def _check_contents(target: Target, own: Sequence[Segment]) -> None:
    """Requires complete contents of a target, in order: an A, its B of one rank, a bias and a
    magnitude, and then all or some rows of the base's weight, each with an id."""
    kinds = tuple(segment.kind for segment in own)
    if not _may_have(target, kinds) or not _have_one_rank(target, own):
        raise InvalidImage(
            f"segment at byte {own[0].offset} is not an A followed by its B, nor another "
            f"content that a target may have: {', '.join(kind.value for kind in kinds)}"
        )
    if kinds[-1] is SegmentKind.ROWS and own[-2].shape[:1] != own[-1].shape[:1]:
        raise InvalidImage(f"rows at byte {own[-1].offset} are more or fewer than their ids")


def _may_have(target: Target, kinds: tuple[SegmentKind, ...]) -> bool:
    if target.kind is TargetKind.VECTOR or target.held is not Held.HERE:
        return kinds == (_FULL,)
    if target.kind is TargetKind.EXPERTS:
        return kinds == LORA_KINDS
    if target.rank_part is not None and kinds[0] is _B:  # a part of A's rank may have no rows
        kinds = (_A, *kinds)
    return kinds in _COMPLETE


def _have_one_rank(target: Target, own: Sequence[Segment]) -> bool:
    """Returns whether A has this layout's part of B's rank."""
    if target.kind is TargetKind.EXPERTS and target.rank_part is not None:
        return True  # the part of the largest rank need not be the largest: see the indices
    ranks = {segment.kind: segment.rank for segment in own if segment.kind in LORA_KINDS}
    start, end = target.ranks(ranks.get(_B, 0))
    return ranks.get(_A, 0) == end - start


def _check_form(segment: Segment, layout: Layout) -> None:
    """Requires the values of the segment's target."""
    target = layout.targets[segment.target]
    dtype, shape = form_of(segment, target, layout.dtype, layout.lora_dtype)
    if target.kind is TargetKind.EXPERTS:  # its index has its contents: see `check_experts`
        is_whole = segment.length_bytes >= index_bytes(shape[0])
    else:
        is_whole = segment.length_bytes == math.prod(shape) * dtype.itemsize
        is_whole &= segment.kind not in LORA_KINDS or segment.rank > 0
    if layout.image_format > 1:
        is_whole &= segment.dtype is dtype and has_valid_scale(segment)
        is_whole &= tuple(segment.shape) == shape
    if not is_whole:
        raise InvalidImage(f"segment at byte {segment.offset} is misplaced")


def form_of(
    segment: Segment, target: Target, dtype: DataType, lora_dtype: DataType
) -> tuple[DataType, tuple[int, ...]]:
    """Returns the type and the shape of a segment's values.

    Args:
        segment: A segment; its kind and rank decide, and where the adapter chooses how many rows
            there are, its shape.
        target: The segment's target.
        dtype: The layout's type.
        lora_dtype: The layout's type of A and B.
    """
    if segment.kind in LORA_KINDS:
        dtype = lora_dtype
    kind, shape = segment.kind, segment.shape
    num_in, num_out = target.num_in, target.num_out
    if not target.out_features and shape:  # the adapter's own
        num_out = shape[-1] if kind is _B else shape[0]
    is_embedding = target.kind is TargetKind.EMBEDDING
    form: tuple[int, ...]
    if target.kind is TargetKind.EXPERTS:
        start, end = target.held_experts
        form = (end - start, num_in if kind is _A else num_out)
    elif kind is _A:
        form = (num_in, segment.rank) if is_embedding else (segment.rank, num_in)
    elif kind is _B:
        form = (segment.rank, num_out)
    elif kind in (SegmentKind.BIAS, SegmentKind.MAGNITUDE) or target.kind is TargetKind.VECTOR:
        form = (num_out,)
    else:
        num_rows, features = (num_in, num_out) if is_embedding else (num_out, num_in)
        if kind is not _FULL:
            num_rows = shape[0] if shape else 0
        form = (num_rows,) if kind is SegmentKind.ROW_IDS else (num_rows, features)
    return _FIXED_DTYPES.get(kind, dtype), form


def has_valid_scale(segment: Segment) -> bool:
    """Returns whether the segment's scale is one that its type may have. That of a bias depends on
    other segments."""
    if segment.dtype is FLOAT8:
        return MIN_SCALE <= segment.scale <= MAX_SCALE
    return segment.scale == 1.0 or segment.kind is SegmentKind.BIAS


def scale_of_target(own: Iterable[Segment]) -> float:
    """Returns the factor of a target's products: of A's values and B's."""
    return math.prod(segment.scale for segment in own if segment.kind in LORA_KINDS)


def _check_bias_scale(own: Sequence[Segment]) -> None:
    expected = scale_of_target(own)
    for segment in own:
        is_bias = segment.kind is SegmentKind.BIAS
        if is_bias and np.float32(segment.scale) != np.float32(expected):
            raise InvalidImage(
                f"the bias at byte {segment.offset} has scale {segment.scale:g}, and A and B have "
                f"{expected:g}"
            )


def _check_places(header: ImageHeader) -> None:
    """Requires that segments lie one behind the other, except segments that share the bytes of an
    earlier one, and that the image ends with the last."""
    end = 0
    earlier: dict[int, Segment] = {}
    for segment in header.segments:
        if segment.offset == end:
            end = align(segment.offset + segment.length_bytes)
            earlier[segment.offset] = segment
        elif (
            header.image_format == 1
            or segment.kind not in SHARED_KINDS
            or not _is_same(segment, earlier.get(segment.offset))
        ):
            raise InvalidImage(f"segment at byte {segment.offset} is misplaced")
    if header.total_bytes != end:
        raise InvalidImage(f"the image has {header.total_bytes} bytes; its segments need {end}")


def _is_same(segment: Segment, earlier: Segment | None) -> bool:
    """Returns whether a segment may share the bytes of an earlier one."""
    if earlier is None:
        return False
    return segment == earlier._replace(
        target=segment.target, offset=segment.offset, scale=segment.scale
    )


def check_experts(
    segments: Sequence[Segment],
    targets: Sequence[Target],
    lora_dtype: DataType,
    read: Callable[[int, int], bytes],
) -> None:
    """Checks the indices of experts.

    Args:
        segments: Segments of a valid image.
        targets: The targets that the segments count.
        lora_dtype: The layout's type of A and B.
        read: Returns bytes of the image, by offset and length.

    Raises:
        InvalidImage: A matrix is misplaced, or A and B of an expert differ in rank.
    """
    for a, b in pairwise(segments):
        target = targets[a.target]
        if target.kind is not TargetKind.EXPERTS or a.kind is not _A:
            continue
        of_a, of_b = _ranks_of((a, b), target, lora_dtype, read)
        if target.rank_part is None and not (of_a == of_b).all():
            raise InvalidImage(f"A and B of experts at byte {a.offset} differ in rank")


def _ranks_of(
    pair: tuple[Segment, Segment],
    target: Target,
    lora_dtype: DataType,
    read: Callable[[int, int], bytes],
) -> Iterator[np.ndarray]:
    for segment in pair:
        _, (num_experts, num_features) = form_of(segment, target, lora_dtype, lora_dtype)
        content = read(segment.offset, num_experts * INDEX_BYTES)
        yield read_ranks(content, segment, num_experts, num_features * lora_dtype.itemsize)
