"""A server that is restricted to some targets: what it computes, and which images it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from contract.images.header import ImageHeader, Segment, align
from contract.images.segment_kinds import LORA_KINDS, REPLACED_KINDS, SegmentKind
from contract.images.targets import OtherName, Target, TargetKind
from inference_svc.adapters.layout import EMBEDDING, HEAD, ModelLayout, refused_kinds
from inference_svc.adapters.targets import lora_groups

MODULES = {
    "q_proj": ("qkv", 8, 8),
    "k_proj": ("qkv", 8, 4),
    "v_proj": ("qkv", 8, 4),
    "o_proj": ("o", 8, 8),
    "down_proj": ("down", 16, 8),
}


@pytest.fixture
def layout() -> ModelLayout:
    """Two layers of an embedding, an attention, a part of an MLP, and a head."""
    targets = [Target("model.embed_tokens", None, EMBEDDING, TargetKind.EMBEDDING, 32, 8)]
    for layer in range(2):
        targets += [
            Target(f"model.layers.{layer}.{name}", layer, f"layers.{layer}.{group}", kind, *n)
            for name, (group, *n) in MODULES.items()
            for kind in (TargetKind.LINEAR,)
        ]
    targets.append(Target("lm_head", None, HEAD, TargetKind.LINEAR, 8, 32))
    return ModelLayout("base", "0" * 64, torch.float32, (1,), tuple(targets))


def header(layout: ModelLayout, *modules: str) -> ImageHeader:
    """An image of these modules in every layer. Where its bytes lie does not matter here."""
    segments = [
        Segment(column, each, 4, 0, 0)
        for column, target in enumerate(layout.targets)
        if target.module in modules
        for each in (SegmentKind.A, SegmentKind.B)
    ]
    return ImageHeader("image", "digest", "layout", 1, 0, tuple(segments))


def test_modules_are_named_in_order_of_use(layout):
    assert layout.modules == ("embed_tokens", *MODULES, "lm_head")


def test_fused_modules_have_the_parts_of_all_layers(layout):
    parts = {"q_proj": (0, 8), "k_proj": (8, 12), "v_proj": (12, 16)}
    targets = [
        replace(each, other_names=(OtherName(f"layers.{each.layer}.qkv", parts[each.module]),))
        if each.module in parts and (each.layer, each.module) != (0, "v_proj")
        else each
        for each in layout.targets
    ]
    assert layout.fused_modules == {}
    assert replace(layout, targets=tuple(targets)).fused_modules == {"qkv": tuple(parts)}


@pytest.mark.parametrize(
    ("lora_targets", "expected"),
    [
        (["q_proj"], {"layers.0.qkv", "layers.1.qkv"}),
        (["k_proj", "v_proj"], {"layers.0.qkv", "layers.1.qkv"}),
        (["down_proj", "lm_head"], {"layers.0.down", "layers.1.down", HEAD}),
        (["embed_tokens"], {EMBEDDING}),
    ],
)
def test_groups_with_an_accepted_target_are_computed(layout, lora_targets, expected):
    every = lora_groups(layout)
    assert len(every) == 8
    groups = lora_groups(layout, lora_targets)
    assert set(groups) == expected
    assert all(groups[name] == every[name] for name in expected), "a group is computed whole"


def test_largest_image_has_the_accepted_targets(layout):
    shape = layout.largest_image(3, ["o_proj"])
    assert shape.num_bytes == 2 * 2 * align(3 * 8 * 4)
    assert shape.cuts == (0, shape.num_bytes // 2)
    assert layout.largest_image(3, layout.modules) == layout.largest_image(3)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        (["q_proj", "v_proj"], None),
        (
            ["down_proj", "q_proj"],
            "a target down_proj, which is not among this server's --lora-targets (q_proj, v_proj)",
        ),
        (
            ["embed_tokens", "o_proj", "v_proj"],
            "targets embed_tokens, o_proj, which are not among this server's --lora-targets "
            "(q_proj, v_proj)",
        ),
    ],
)
def test_image_of_other_targets_is_refused(layout, modules, reason):
    found = header(layout, *modules)
    assert layout.refusal(found, ("v_proj", "q_proj")) == reason
    assert layout.refusal(found) is None


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (LORA_KINDS, None),
        ([*LORA_KINDS, SegmentKind.MAGNITUDE], "DoRA magnitudes, which this server does not apply"),
        (
            REPLACED_KINDS,
            "rows of its own for tokens, whole weights of its own, "
            "which this server does not apply",
        ),
        ([99], "segments of kind 99, which this server does not apply"),
    ],
)
def test_kinds_that_are_not_applied_are_named(kinds, reason):
    assert refused_kinds(kinds) == reason
