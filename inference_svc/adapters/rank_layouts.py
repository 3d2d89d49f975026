"""Checks that images of ranks, each of which has a part of a model, lie alike."""

from __future__ import annotations

from collections.abc import Sequence

from contract.images.header import Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.errors import AdapterUnusable, CorruptImage


def check_alike(own: Sequence[Segment], first: Sequence[Segment], expert_parallel: int) -> None:
    """Checks that a rank's image has the segments of the first rank's at the same offsets, so that
    it lies in the same extents; scales may differ. `expert_parallel` is how many parts of the
    experts ranks have.

    Raises AdapterUnusable for experts whose A and B differ in size between these parts, else
    CorruptImage.
    """
    if [each._replace(scale=1.0) for each in own] == [each._replace(scale=1.0) for each in first]:
        return
    if expert_parallel > 1 and [_place(each) for each in own] == [_place(each) for each in first]:
        raise AdapterUnusable(
            "its experts have A and B of different sizes, or some have none: with "
            f"--expert-parallel {expert_parallel} each process must get as many bytes as the "
            "others; serve it without the setting",
            subject="adapter",
        )
    reason = "the store's image for another rank has other segments"
    raise CorruptImage(f"{reason}; upgrade the store if it is older than this server")


def _place(segment: Segment) -> tuple[int, SegmentKind]:
    return segment.target, segment.kind
