"""The scales of float8 segments, which follow from their values.

A segment's scale is the least power of two with which every value of A, or of B with the adapter's
scale folded in, is at most 448, the largest number of E4M3. Powers of two round nothing, and lose
nothing: the precision of E4M3 is the same for values from 448 down to 2^-6. The values are those of
the whole saved tensors, so that the parts of a sliced target have one scale. A bias has the product
of A's and B's, so that servers multiply products and bias by one factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.reading.files import OpenFile
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.checkpoint.reading.scan import read_largest
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.plan.plan import ImagePlan
from adapter_store.images.plan.sources import SegmentSource
from contract.images.dtypes import FLOAT8
from contract.images.header import MAX_SCALE, MIN_SCALE, Segment
from contract.images.rules import scale_of_target
from contract.images.segment_kinds import SegmentKind

LARGEST = 448.0
"""The largest number of E4M3."""


def measured(checkpoint: Checkpoint, plan: ImagePlan) -> ImagePlan:
    """Returns a plan, which has its sources, with scales; their values are read once.

    Raises:
        IncompatibleAdapter: CAST_OVERFLOW (subject: the tensor), a value is too large.
        CorruptData: the source differs from its digest, or got shorter.
    """
    if plan.has_scales:
        return plan
    try:
        with checkpoint.open_files() as files:
            return with_scales(plan, _scales(files, plan.sources))
    except IncompatibleAdapter:
        checkpoint.verify()  # a flipped bit must not look like an overflow
        raise


def with_scales(plan: ImagePlan, of_float8: Iterable[float]) -> ImagePlan:
    """Returns a plan with these scales of its float8 segments, and those of its biases: the
    sources' values are divided by them. Raises ValueError if there are more or fewer."""
    segments = tuple(_with_scales(plan.segments, of_float8))
    scales = [segment.scale for segment in segments]
    sources = (
        source._replace(
            pieces=tuple(piece._replace(scale=piece.scale / scale) for piece in source.pieces)
        )
        for source, scale in zip(plan.sources, scales, strict=False)
    )
    return replace(plan, segments=segments, sources=tuple(sources), has_scales=True)


def _with_scales(segments: Iterable[Segment], of_float8: Iterable[float]) -> Iterator[Segment]:
    known = iter(of_float8)
    for _, found in groupby(segments, lambda segment: segment.target):
        own = list(found)
        for index, segment in enumerate(own):
            if segment.dtype is FLOAT8:
                scale = next(known, None)
                if scale is None:
                    raise ValueError("a scale is missing")
                own[index] = segment._replace(scale=scale)
            elif segment.kind is SegmentKind.BIAS:
                own[index] = segment._replace(scale=scale_of_target(own))
        yield from own
    if next(known, None) is not None:
        raise ValueError("there are more scales than segments")


def scale_of(largest: float) -> float:
    """Returns the scale of values of which `largest` is the largest magnitude. It is at least
    MIN_SCALE: smaller values than such a scale is for lose precision, and then become 0."""
    if largest == 0:
        return 1.0
    mantissa, exponent = math.frexp(largest / LARGEST)
    return max(math.ldexp(1.0, exponent - (mantissa == 0.5)), MIN_SCALE)


def _scales(files: Mapping[str, OpenFile], sources: Sequence[SegmentSource]) -> Iterator[float]:
    known: dict[str, float] = {}
    for source in sources:
        if source.dtype is not FLOAT8:
            continue
        largest = 0.0
        for piece in source.pieces:
            record = piece.matrix.record
            if record.key not in known:
                known[record.key] = read_largest(files[record.file], record)
            own = known[record.key] * abs(piece.scale)
            if not own <= LARGEST * MAX_SCALE:
                raise _too_large(record, piece.scale)
            largest = max(largest, own)
        yield scale_of(largest)


def _too_large(record: TensorRecord, scale: float) -> IncompatibleAdapter:
    return IncompatibleAdapter(
        f"{record.key}: values scaled by {scale:g} are not finite, or too large for float8 with a "
        f"factor of {MAX_SCALE:g}",
        subject=record.key,
        reason="CAST_OVERFLOW",
    )
