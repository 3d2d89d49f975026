"""Images of a model in stages: each stage has its own part of an image, in an arena of its own.

To the engine the parts are one image, one part behind the other, in one memory: the arenas of all
stages, one behind the other. A stage gets its part, and its extents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from contract.images.header import GRANULE_BYTES, ImageHeader, align
from inference_svc.adapters.memory.extents import Extent, ExtentAllocator
from inference_svc.adapters.memory.resident import Shape


@dataclass(frozen=True, slots=True)
class StagedHeader(ImageHeader):
    """The header of all stages' parts of an image, whose segments follow each other."""

    parts: tuple[ImageHeader, ...] = ()


def joined(parts: Sequence[ImageHeader]) -> ImageHeader:
    """Returns the header of an image with these parts, by stage."""
    if len(parts) == 1:
        return parts[0]
    segments = tuple(
        segment._replace(offset=first + segment.offset)
        for first, part in zip(_firsts(parts), parts, strict=False)
        for segment in part.segments
    )
    first = parts[0]
    return StagedHeader(
        image_id=first.image_id,
        digest=first.digest,
        layout_id=first.layout_id,
        image_format=first.image_format,
        total_bytes=_firsts(parts)[-1],
        segments=segments,
        parts=tuple(parts),
    )


def parts_of(header: ImageHeader) -> tuple[ImageHeader, ...]:
    """Returns the parts of an image, by stage."""
    return header.parts if isinstance(header, StagedHeader) else (header,)


def _firsts(parts: Iterable[ImageHeader]) -> list[int]:
    """Returns the offset of each part, and of the end."""
    return [*accumulate((align(part.total_bytes) for part in parts), initial=0)]


def extents_of(
    header: ImageHeader, extents: Iterable[Extent], stage: int, capacity: int
) -> tuple[Extent, ...]:
    """Returns the extents of a stage's part of an image, in its own arena of `capacity` bytes."""
    if len(parts_of(header)) == 1:
        return tuple(extents)
    first, memory = _firsts(parts_of(header))[stage], stage * _whole(capacity)
    return tuple(
        replace(each, image_offset=each.image_offset - first, start=each.start - memory)
        for each in extents
        if each.start // _whole(capacity) == stage
    )


def shape_of(header: ImageHeader) -> tuple[Shape, ...]:
    """Returns the shapes of an image's parts, by stage."""
    return tuple(map(Shape.of, parts_of(header)))


def _whole(num_bytes: int) -> int:
    return num_bytes // GRANULE_BYTES * GRANULE_BYTES


class StageMemories:
    """Allocates extents in the arenas of `num_stages` stages, of `stage_bytes` each; see
    `ExtentAllocator`. An image is there if all of its parts are."""

    def __init__(self, stage_bytes: int, num_stages: int = 1) -> None:
        self._stages = [ExtentAllocator(stage_bytes) for _ in range(num_stages)]

    @classmethod
    def with_used(cls, stage_bytes: int, num_stages: int, used: Iterable[Extent]) -> StageMemories:
        """Returns memories in which only these extents, which do not overlap, are used."""
        made = cls(stage_bytes, num_stages)
        by_stage: list[list[Extent]] = [[] for _ in range(num_stages)]
        for extent in used:
            stage = made._stage_of(extent)
            by_stage[stage].append(made._moved(extent, -stage))
        made._stages = [ExtentAllocator.with_used(stage_bytes, own) for own in by_stage]
        return made

    @property
    def stage_capacity(self) -> int:
        return self._stages[0].capacity

    @property
    def capacity(self) -> int:
        return len(self._stages) * self.stage_capacity

    @property
    def free_bytes(self) -> int:
        return sum(each.free_bytes for each in self._stages)

    @property
    def first_used_bytes(self) -> int:
        """The used bytes of the first stage."""
        return self.stage_capacity - self._stages[0].free_bytes

    @property
    def least_free_bytes(self) -> int:
        """The free bytes of the stage that has the fewest."""
        return min(each.free_bytes for each in self._stages)

    @property
    def largest_free_bytes(self) -> int:
        return max(each.largest_free_bytes for each in self._stages)

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """Pairs of start and bytes, ascending."""
        return [
            (stage * self.stage_capacity + start, size)
            for stage, each in enumerate(self._stages)
            for start, size in each.free_ranges
        ]

    @property
    def num_free_ranges(self) -> int:
        return sum(each.num_free_ranges for each in self._stages)

    def copy(self) -> StageMemories:
        """Returns equal memories to plan with."""
        other = StageMemories(0, 0)
        other._stages = [each.copy() for each in self._stages]
        return other

    def allocate(self, parts: Sequence[Shape]) -> tuple[Extent, ...] | None:
        """Allocates an image's parts, by stage, with as few extents as possible. Returns None, and
        changes nothing, when one does not fit."""
        assert len(parts) <= len(self._stages)
        found: list[Extent] = []
        offset = 0
        for stage, (own, part) in enumerate(zip(self._stages, parts, strict=False)):
            extents = own.allocate(part.num_bytes, part.cuts)
            if extents is None:
                self.free(found)
                return None
            found += (self._moved(each, stage, offset) for each in extents)
            offset += align(part.num_bytes)
        return tuple(found)

    def free(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            stage = self._stage_of(extent)
            self._stages[stage].free([self._moved(extent, -stage)])

    def _stage_of(self, extent: Extent) -> int:
        return extent.start // self.stage_capacity

    def _moved(self, extent: Extent, num_stages: int, offset: int = 0) -> Extent:
        """Returns an extent so many stages, and so many bytes of the image, behind."""
        if not num_stages and not offset:
            return extent
        start = extent.start + num_stages * self.stage_capacity
        return replace(extent, start=start, image_offset=extent.image_offset + offset)

    def check_integrity(self, used: Iterable[Extent]) -> None:
        """Asserts that `used` and the free ranges tile the memories exactly."""
        by_stage: list[list[Extent]] = [[] for _ in self._stages]
        for extent in used:
            stage = self._stage_of(extent)
            by_stage[stage].append(self._moved(extent, -stage))
        for allocator, own in zip(self._stages, by_stage, strict=True):
            allocator.check_integrity(own)
