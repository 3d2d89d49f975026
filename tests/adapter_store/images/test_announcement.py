"""The identity of announcements, and the names that a restriction accepts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapter_store.core import Announcement, SegmentKind
from adapter_store.images.announcement import announcement_id, module_names

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
        )
    ]
    ids = {announcement_id(LAYOUT_ID, each) for each in (first, *others)}
    assert len(ids) == len(others) + 1


def test_restriction_accepts_the_names_of_its_targets(make_layout):
    layout = make_layout()
    assert module_names(layout, ()) == frozenset()
    assert module_names(layout, ("q_proj", "o_proj")) == {"q_proj", "o_proj"}
