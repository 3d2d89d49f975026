"""The identity of announcements, and what of images they are about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.core import Announcement, ImageContent, Part
from adapter_store.images.plan.announcement import announcement_id, content_of
from adapter_store.images.plan.plan import plan_image
from contract.images.segment_kinds import SegmentKind

LAYOUT_ID = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("announcement", "expected"),
    [
        (Announcement(), "6ef62f1b68a1d657b55c57a613972f007c978bcd14dc2699abcff0e9eb2d3999"),
        (
            Announcement(("tiny", "alias", "tiny"), 16),
            "10ede9aa3d969f0bab38257b1dfea13d08220154c3493f9f817b0c3dc310b780",
        ),
        (
            Announcement(("tiny",), is_renewed=False),
            "9b62852522c029045e731e50cb998646bec0762cc347d467a6c8e1f919be165f",
        ),
    ],
)
def test_servers_of_the_release_before_keep_their_ids(announcement, expected):
    assert announcement_id(LAYOUT_ID, announcement) == f"sha256:{expected}"


def test_identity_follows_what_is_said_and_not_its_order():
    first = Announcement(
        lora_targets=("q_proj", "v_proj"), segment_kinds=(SegmentKind.BIAS, SegmentKind.FULL)
    )
    same = Announcement(
        lora_targets=("v_proj", "q_proj", "v_proj"),
        segment_kinds=(SegmentKind.FULL, SegmentKind.BIAS),
    )
    assert announcement_id(LAYOUT_ID, first) == announcement_id(LAYOUT_ID, same)
    others = [
        replace(first, **change)
        for change in (
            {"lora_targets": ("q_proj",)},
            {"lora_targets": ()},
            {"segment_kinds": ()},
            {"max_added_tokens": 1},
            {"applies_invocation_tokens": True},
            {"max_rank": 1},
            {"weight_form": "int4"},
            {"part": Part(2, 0)},
            {"part": Part(2, 1)},
            {"part": Part(3, 1)},
            {"part": Part(2, 1, LAYOUT_ID)},
        )
    ]
    ids = {announcement_id(LAYOUT_ID, each) for each in (first, *others)}
    assert len(ids) == len(others) + 1


def test_content_is_by_the_layouts_names(make_adapter, make_layout):
    layout = make_layout()
    plan = plan_image(open_checkpoint(make_adapter(("q_proj", "lm_head"))), layout)
    assert content_of(plan, layout) == ImageContent(("lm_head", "q_proj"), ())
    kinds = (SegmentKind.FULL, SegmentKind.A, SegmentKind.B, SegmentKind.BIAS)
    segments = tuple(plan.segments[0]._replace(kind=kind) for kind in kinds)
    content = content_of(replace(plan, segments=segments), layout)
    assert content.segment_kinds == (SegmentKind.BIAS, SegmentKind.FULL)
    assert content.names == (("q_proj",), ("q_proj",))
    assert content_of(replace(plan, segments=()), layout) == ImageContent((), ())
