"""Checks images of ranks, each of which has a part of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contract.images.header import Segment
from contract.images.segment_kinds import KIND_WORDS, SegmentKind
from contract.images.targets import Target
from contract.words import listed
from inference_svc.errors import AdapterUnusable

NOT_OF_RANKS = (SegmentKind.BIAS, SegmentKind.MAGNITUDE)
"""Segments that are not applied where a model is cut: each rank would have a part of a norm, or a
bias of its own."""


def check_cut(targets: Sequence[Target], segments: Iterable[Segment]) -> None:
    """Checks the segments of an image for these targets. Raises AdapterUnusable for one that ranks
    do not apply to their parts."""
    if all(each.in_slice is None and each.out_slice is None for each in targets):
        return
    refused = {each.kind for each in segments if each.kind in NOT_OF_RANKS}
    if refused:
        what = listed(sorted(KIND_WORDS[kind] for kind in refused))
        reason = f"it has {what}, which a server with --tensor-parallel does not apply"
        raise AdapterUnusable(reason, subject="adapter")
