"""Both ends agree on images: the store's plans, and anything else that a server may receive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract import protobuf
from contract.images import layout_rules, rules
from contract.images.dtypes import DataType
from contract.images.header import ImageHeader, InvalidImage, Segment
from contract.images.layouts import InvalidLayout, Layout
from contract.images.segment_kinds import (
    FURTHER_KINDS,
    KIND_LABELS,
    KIND_WORDS,
    LORA_KINDS,
    SegmentKind,
)
from contract.images.targets import Held, Target, TargetKind

A, B = LORA_KINDS
F32 = DataType.FLOAT32
TARGETS = (
    Target("q_proj", 0, "q", TargetKind.LINEAR, 8, 4, rank_part=(1, 2)),
    Target("experts", 0, "experts", TargetKind.EXPERTS, 8, 4, experts=2),
    Target("norm", 0, "norm", TargetKind.VECTOR, 0, 8),
    Target("tower", 0, "tower", TargetKind.LINEAR, 8, 4, held=Held.UNUSED),
    Target("score", None, "score", TargetKind.LINEAR, 8, 0),
)
LAYOUT = Layout("base", "0" * 64, F32, 2, TARGETS)


def image(*segments: Segment) -> ImageHeader:
    """An image of these segments, one behind the other."""
    placed, end = [], 0
    for segment in segments:
        placed.append(segment._replace(offset=end))
        end += -(-segment.length_bytes // 256) * 256
    return ImageHeader("image", "digest", "layout", 2, end, tuple(placed))


def segment(target: int, kind: SegmentKind, rank: int, *shape: int) -> Segment:
    size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Segment(target, kind, rank, 0, size, F32, shape)


EXPERTS = [
    Segment(1, A, 1, 0, 256 + 512, F32, (2, 8)),
    Segment(1, B, 1, 0, 256 + 512, F32, (2, 4)),
]


@pytest.mark.parametrize(
    "segments",
    [
        [segment(0, A, 2, 2, 8), segment(0, B, 4, 4, 4)],
        [segment(0, B, 1, 1, 4)],
        EXPERTS,
        [segment(2, SegmentKind.FULL, 0, 8)],
        [segment(4, A, 3, 3, 8), segment(4, B, 3, 3, 5), segment(4, SegmentKind.BIAS, 0, 5)],
        [segment(4, SegmentKind.FULL, 0, 5, 8)],
        [],
    ],
    ids=["a part of the rank", "no row of A", "experts", "norm", "outputs", "whole", "empty"],
)
def test_images_that_a_store_may_plan(segments: list[Segment]) -> None:
    header = image(*segments)
    rules.validate(header, LAYOUT)
    assert protobuf.read_header(protobuf.write_header(header)) == header


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([segment(0, A, 4, 4, 8), segment(0, B, 4, 4, 4)], "not an A followed by its B"),
        ([segment(1, B, 1, 1, 4)], "not an A followed by its B"),
        ([segment(3, A, 2, 2, 8), segment(3, B, 2, 2, 4)], "not an A followed by its B"),
        ([segment(2, SegmentKind.BIAS, 0, 8)], "not an A followed by its B"),
        ([segment(2, SegmentKind.UNKNOWN, 0, 8)], "nor another content .*: unknown"),
        ([EXPERTS[0]._replace(length_bytes=16), EXPERTS[1]], "at byte 0 is misplaced"),
        ([segment(2, SegmentKind.FULL, 0, 7)], "at byte 0 is misplaced"),
        ([segment(9, A, 2, 2, 8)], "does not fit the layout"),
    ],
)
def test_images_that_break_a_rule(segments: list[Segment], words: str) -> None:
    with pytest.raises(InvalidImage, match=words):
        rules.validate(image(*segments), LAYOUT)


def test_layouts_survive_the_wire() -> None:
    layout_rules.validate(LAYOUT)
    message = protobuf.write_layout(LAYOUT, (1, 2))
    assert list(message.image_formats) == [1, 2]
    assert replace(protobuf.read_layout(message), image_format=2) == LAYOUT
    message.targets[0].kind = 99
    with pytest.raises(InvalidLayout, match=r"^layout\.targets\[0\]\.kind: 99 is not known$"):
        protobuf.read_layout(message)


def test_every_kind_has_words_and_a_number() -> None:
    assert {*LORA_KINDS, *FURTHER_KINDS, SegmentKind.UNKNOWN} == set(SegmentKind)
    assert KIND_WORDS.keys() == set(FURTHER_KINDS)
    assert KIND_LABELS.keys() == set(SegmentKind)
    assert set(protobuf.SEGMENT_KINDS.values()) == {*LORA_KINDS, *FURTHER_KINDS}
    assert set(protobuf.TARGET_KINDS.values()) == {*TargetKind} - {TargetKind.UNKNOWN}
