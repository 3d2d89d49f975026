"""The identity of announcements, and what of images they are about."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.core import Announcement, ImageContent, Part
from adapter_store.images.plan.announcement import announcement_id, content_of
from adapter_store.images.plan.plan import plan_image
from contract.images.header import Segment
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind
from tests.support.store import trained_experts
from tests.support.store.checkpoints import WEIGHTS

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


def test_experts_that_differ_between_the_parts_of_ranks(tmp_path):
    """In their number, or in their ranks. Nobody compares the experts of one part."""
    whole, part = trained_experts.layout(), trained_experts.layout(expert_slice=(0, 2))
    saved = trained_experts.FOLDERS / "experts_apart"
    assert content_of(plan_image(open_checkpoint(saved), part), part).uneven_experts == ()
    folder = Path(shutil.copytree(saved, tmp_path / "uneven"))
    tensors = load_file(folder / WEIGHTS)
    last = f"{trained_experts.MODULE}.{trained_experts.EXPERTS - 1}.down_proj"
    keys = [key for key in tensors if f"{last}." in key]
    assert len(keys) == 2
    pair = {key: tensors.pop(key) for key in keys}
    save_file(tensors, folder / WEIGHTS)
    plan = plan_image(open_checkpoint(folder), part)
    assert content_of(plan, part).uneven_experts == ("down_proj",)
    plan = plan_image(open_checkpoint(folder), whole)
    assert content_of(plan, whole).uneven_experts == ()
    alike = {key.replace(".3.", ".1."): value for key, value in pair.items()}
    save_file({key: v for key, v in tensors.items() if key not in alike}, folder / WEIGHTS)
    plan = plan_image(open_checkpoint(folder), part)
    assert content_of(plan, part).uneven_experts == (), "each part lacks one"


@pytest.mark.parametrize(
    ("fields", "of_bias", "found"),
    [
        ({"in_slice": (0, 2), "out_slice": (2, 4)}, {}, ("q_proj.bias",)),
        ({"in_slice": (0, 2), "out_slice": (2, 4)}, {"out_slice": (2, 4)}, ()),
        ({"in_slice": (0, 2)}, {}, ()),
    ],
)
def test_biases_that_ranks_share(make_adapter, make_layout, fields, of_bias, found):
    """In place of the base's, and whole, where each rank has some inputs and some outputs."""
    layout = make_layout()
    plan = plan_image(open_checkpoint(make_adapter(("q_proj",))), layout)
    index = plan.segments[0].target
    target = replace(layout.targets[index], **fields)
    vector = replace(layout.targets[index], name=f"{target.name}.bias", kind=TargetKind.VECTOR)
    bias = replace(vector, in_features=0, **of_bias)
    targets = (*layout.targets[:index], target, *layout.targets[index + 1 :], bias)
    own = Segment(len(layout.targets), SegmentKind.FULL, 0, 0, 4)
    cut = replace(layout, targets=targets)
    assert content_of(replace(plan, segments=(own,)), cut).shared_biases == found
    assert content_of(plan, cut).shared_biases == ()
