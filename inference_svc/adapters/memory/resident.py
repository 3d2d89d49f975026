"""An image in a memory, and its shape to an allocator."""

from __future__ import annotations

from dataclasses import dataclass, field

from contract.images.header import ImageHeader
from inference_svc.adapters.memory.extents import Extent


@dataclass(eq=False, slots=True)
class Resident:
    """One image in this memory, `ready` once its bytes are complete and verified.

    `users` counts the running sequences (or copies) that read it. `pinned_by` are the accounts
    that have pinned it; "" has no share.
    """

    header: ImageHeader
    slot: int
    extents: tuple[Extent, ...]
    rank: int
    ready: bool = False
    users: int = 0
    pinned_by: set[str] = field(default_factory=set)
    draining: bool = False
    last_used_time_s: float = 0.0
    load_seconds: float = 0.0

    @property
    def digest(self) -> str:
        return self.header.digest

    @property
    def pinned(self) -> bool:
        return bool(self.pinned_by)

    @property
    def num_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents)


def target_cuts(header: ImageHeader) -> list[int]:
    """Returns the image offsets at which the bytes of a target start, where an image may be cut."""
    cuts: list[int] = []
    previous, end = -1, 0
    for segment in header.segments:
        if segment.offset < end:
            continue  # it shares the bytes of an earlier one
        end = segment.offset + segment.length_bytes
        if segment.target != previous:
            cuts.append(segment.offset)
            previous = segment.target
    return cuts


@dataclass(frozen=True, slots=True)
class Shape:
    """An image to an allocator: its size, and where it may be cut."""

    num_bytes: int
    cuts: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, header: ImageHeader) -> Shape:
        return cls(header.total_bytes, tuple(target_cuts(header)))
