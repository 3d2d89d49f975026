"""The contents that an adapter may have for a target, and their names for people."""

from __future__ import annotations

import enum


class SegmentKind(enum.Enum):
    """Kind of a change that an adapter makes to a module: the meaning of a segment's bytes, in the
    order of one target's segments. UNKNOWN: the sender is newer; no image is read with it."""

    A = "a"
    B = "b"
    BIAS = "bias"
    MAGNITUDE = "magnitude"
    ROW_IDS = "row_ids"
    ROWS = "rows"
    FULL = "full"
    UNKNOWN = "unknown"

    __hash__ = object.__hash__  # Enum's own is Python code, called for every segment of an image


LORA_KINDS = (SegmentKind.A, SegmentKind.B)
"""The kinds that every server applies."""
FURTHER_KINDS = (
    SegmentKind.BIAS,
    SegmentKind.MAGNITUDE,
    SegmentKind.ROW_IDS,
    SegmentKind.ROWS,
    SegmentKind.FULL,
)
"""The kinds that a server announces if it applies them."""
ADDED_KINDS = (*LORA_KINDS, SegmentKind.BIAS)
"""Kinds that add to the base's outputs: sums may have any number of them."""
ROW_KINDS = (SegmentKind.ROW_IDS, SegmentKind.ROWS)
"""Kinds that replace rows of the base's weight."""
REPLACED_KINDS = (*ROW_KINDS, SegmentKind.FULL)
"""Kinds that replace the base's weight."""
SHARED_KINDS = (SegmentKind.A, *REPLACED_KINDS)
"""Kinds whose bytes targets may share: an A of a fused module, and a tied head's rows."""

KIND_WORDS = {
    SegmentKind.BIAS: "biases of LoRA",
    SegmentKind.MAGNITUDE: "DoRA magnitudes",
    SegmentKind.ROW_IDS: "rows of its own for tokens",
    SegmentKind.ROWS: "rows of its own for tokens",
    SegmentKind.FULL: "whole weights of its own",
}
"""The further kinds in words, as of an adapter that has them."""

KIND_LABELS = {
    SegmentKind.A: "A",
    SegmentKind.B: "B",
    SegmentKind.BIAS: "bias of B",
    SegmentKind.MAGNITUDE: "DoRA magnitude",
    SegmentKind.ROW_IDS: "",  # ROWS has them
    SegmentKind.ROWS: "rows of tokens",
    SegmentKind.FULL: "whole weight",
    SegmentKind.UNKNOWN: "unknown",
}
"""The kinds in a column of a table."""
