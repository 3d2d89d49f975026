"""Images of format 2: every kind of segment, modules that compute several targets, experts, and
what each of several ranks holds."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from adapter_store.checkpoint.weights import ExpertWeights, Matrix, ParameterOrder, Replacement
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.compile import compile_image
from adapter_store.images.plan.announcement import content_of
from adapter_store.images.plan.layout import from_text, layout_id, to_text, validate
from adapter_store.images.tiers.file import read_image, write_image
from contract.images.dtypes import DataType
from contract.images.layouts import Layout
from contract.images.segment_kinds import FURTHER_KINDS, LORA_KINDS, SegmentKind
from contract.images.targets import Held, OtherName, Target, TargetKind
from tests.support.store.format_2 import (
    EMBEDDING,
    EXPERTS,
    GATE,
    GATE_UP,
    HEAD,
    HIDDEN,
    INNER,
    NORM,
    QKV,
    SCALE,
    SIZES,
    TURNED,
    UP,
    VOCAB,
    W1,
    K,
    Q,
    Saved,
    V,
    change,
    experts_of,
    hashes_of,
    layout_of,
    linear,
    values_of,
)


def pair(name: str, rank: int, size_in: int, size_out: int) -> dict[str, torch.Tensor]:
    return {f"{name}.A": torch.randn(rank, size_in), f"{name}.B": torch.randn(size_out, rank)}


@pytest.fixture
def everything(tmp_path) -> Saved:
    torch.manual_seed(0)
    tensors = {
        **pair(QKV, 3, HIDDEN, 64),
        **pair(GATE_UP, 5, HIDDEN, 2 * INNER),
        **pair(EMBEDDING, 2, VOCAB, HIDDEN),
        **pair(Q, 4, HIDDEN, 32),
        "bias": torch.randn(64),
        "magnitude": torch.rand(64) + 1,
        "norm": torch.randn(HIDDEN),
        "rows": torch.randn(3, HIDDEN),
        "experts.A": torch.randn(EXPERTS * 2, HIDDEN),
        "experts.B": torch.randn(INNER, 2 * EXPERTS),
        "head": torch.randn(VOCAB, HIDDEN),
    }
    return Saved(tmp_path / "adapter", tensors)


def parameter(saved: Saved, name: str) -> ExpertWeights:
    """As PEFT saves a parameter of three dimensions: A [experts * rank, first], and of B every
    EXPERTSth column."""
    a, b = Matrix.of(saved.records["experts.A"]), Matrix.of(saved.records["experts.B"])
    pairs = {
        expert: (
            a.part(range(2 * expert, 2 * expert + 2), range(a.shape[1])),
            b.part(range(b.shape[0]), range(expert, b.shape[1], EXPERTS)),
        )
        for expert in range(EXPERTS)
    }
    tensors = (("A", saved.records["experts.A"]), ("B", saved.records["experts.B"]))
    return ExpertWeights(name, name, 8.0, SCALE, EXPERTS, pairs, tensors, is_parameter=True)


def test_every_field_is_compiled_and_read_again(everything, tmp_path):
    saved, layout = everything, layout_of()
    checkpoint = saved.checkpoint(
        saved.lora(QKV, bias="bias", magnitude="magnitude"),
        saved.lora(GATE_UP),
        saved.lora(EMBEDDING, TargetKind.EMBEDDING),
        parameter(saved, f"{W1}_turned"),
        Replacement(NORM, NORM, TargetKind.VECTOR, saved.records["norm"]),
        Replacement(EMBEDDING, EMBEDDING, TargetKind.EMBEDDING, saved.records["rows"], (7, 9, 511)),
        Replacement(HEAD, HEAD, TargetKind.LINEAR, saved.records["head"]),
    )
    image = compile_image(checkpoint, layout)
    values, tensors = values_of(image, layout), saved.tensors
    start = 0
    for name, size in SIZES.items():
        rows = slice(start, start + size)
        assert values[name, SegmentKind.A].equal(tensors[f"{QKV}.A"])
        assert values[name, SegmentKind.B].equal(SCALE * tensors[f"{QKV}.B"][rows].T)
        assert values[name, SegmentKind.BIAS].equal(SCALE * tensors["bias"][rows])
        assert values[name, SegmentKind.MAGNITUDE].equal(tensors["magnitude"][rows])
        start += size
    for part, name in enumerate((GATE, UP)):
        assert values[name, SegmentKind.B].equal(SCALE * tensors[f"{GATE_UP}.B"][part::2].T)
    a, b = (
        experts_of(values[W1, kind], size)
        for kind, size in (
            (SegmentKind.A, HIDDEN),
            (SegmentKind.B, INNER),
        )
    )
    for expert in range(EXPERTS):
        assert a[expert].equal(tensors["experts.A"][2 * expert : 2 * expert + 2])
        assert b[expert].equal(SCALE * tensors["experts.B"][:, expert::EXPERTS].T)
    assert values[NORM, SegmentKind.FULL].equal(tensors["norm"])
    assert values[EMBEDDING, SegmentKind.ROW_IDS].tolist() == [7, 9, 511]
    assert values[EMBEDDING, SegmentKind.ROWS].equal(tensors["rows"])
    assert values[EMBEDDING, SegmentKind.A].equal(tensors[f"{EMBEDDING}.A"].T)
    assert values[HEAD, SegmentKind.FULL].equal(tensors["head"])
    assert {kind for _, kind in values} == {*LORA_KINDS, *FURTHER_KINDS}

    write_image(tmp_path / "image", image)
    again = read_image(tmp_path / "image", image.plan)
    assert again.buffer.equal(image.buffer)
    assert again.sha256 == image.sha256


def test_targets_of_a_fused_module_share_its_a(everything):
    layout = layout_of()
    plan = compile_image(everything.checkpoint(everything.lora(QKV)), layout).plan
    a = [segment for segment in plan.segments if segment.kind is SegmentKind.A]
    assert len(a) == 3
    assert {(segment.offset, segment.length_bytes) for segment in a} == {(0, 3 * HIDDEN * 4)}
    assert plan.total_bytes == sum(-(-n // 256) * 256 for n in (384, 3 * 32 * 4, 192, 192))


def test_the_store_hashes_what_it_compiles_from_a_blob(everything):
    """A tensor that several segments are made of is checked all the same."""
    saved = everything
    checkpoint = dataclasses.replace(saved.checkpoint(saved.lora(QKV)), is_verified=False)
    with pytest.raises(Exception, match="no longer has this digest"):
        compile_image(checkpoint, layout_of())


@pytest.mark.parametrize(
    ("name", "others", "is_in_out"),
    [(TURNED.name, (TURNED,), True), (W1, (TURNED,), True), (W1, (), False)],
    ids=["saved as [in, out]", "by its own name", "saved as [out, in]"],
)
def test_a_parameter_is_turned_where_the_layout_says_so(tmp_path, name, others, is_in_out):
    """Both dimensions equal: shapes cannot tell. The layout says it of a module by one name."""
    torch.manual_seed(1)
    tensors = {
        "experts.A": torch.randn(EXPERTS * 2, HIDDEN),
        "experts.B": torch.randn(HIDDEN, 2 * EXPERTS),
    }
    saved = Saved(tmp_path / "square", tensors)
    layout = change(layout_of(), W1, out_features=HIDDEN, other_names=others)
    delta = torch.einsum(
        "ore,eri->eio",
        tensors["experts.B"].reshape(HIDDEN, 2, EXPERTS),
        tensors["experts.A"].reshape(EXPERTS, 2, HIDDEN),
    )  # of the parameter [experts, first, second], as PEFT computes it
    saved_first = dataclasses.replace(parameter(saved, name), order=ParameterOrder.FIRST)
    values = values_of(compile_image(saved.checkpoint(saved_first), layout), layout)
    a, b = (experts_of(values[W1, kind], HIDDEN) for kind in (SegmentKind.A, SegmentKind.B))
    for expert in range(EXPERTS):
        found = b[expert].T @ a[expert]  # [out, in]
        wanted = delta[expert].T if is_in_out else delta[expert]
        torch.testing.assert_close(found, SCALE * wanted)


def test_experts_may_share_an_a_and_differ_in_rank(tmp_path):
    tensors = {
        "shared": torch.randn(3, HIDDEN),
        "b0": torch.randn(INNER, 3),
        "b2": torch.randn(INNER, 3),
        "a3": torch.randn(1, HIDDEN),
        "b3": torch.randn(INNER, 1),
    }
    saved = Saved(tmp_path / "experts", tensors)
    matrices = {name: Matrix.of(record) for name, record in saved.records.items()}
    pairs = {
        0: (matrices["shared"], matrices["b0"]),
        2: (matrices["shared"], matrices["b2"]),
        3: (matrices["a3"], matrices["b3"]),
    }
    experts = ExpertWeights(*(W1, W1, 8.0, SCALE, EXPERTS, pairs, tuple(saved.records.items())))
    layout = layout_of()
    image = compile_image(saved.checkpoint(experts), layout)
    values = values_of(image, layout)
    a = experts_of(values[W1, SegmentKind.A], HIDDEN)
    b = experts_of(values[W1, SegmentKind.B], INNER)
    assert [len(each) for each in a] == [len(each) for each in b] == [3, 0, 3, 1]
    assert a[0].equal(tensors["shared"])
    assert a[0].data_ptr() == a[2].data_ptr()
    assert b[2].equal(SCALE * tensors["b2"].T)
    assert [segment.rank for segment in image.plan.segments] == [3, 3]


def test_a_fused_pair_of_experts_shares_its_a_also_where_none_is_held(tmp_path):
    """Gate and up of all experts in one parameter; a rank that holds no expert of the adapter."""
    w3, fused = W1.replace("w1", "w3"), W1.replace("w1", "w13")
    layout = layout_of()
    made = []
    for part, name in enumerate((W1, w3)):
        names = (OtherName(fused, outputs=(part * INNER, (part + 1) * INNER)),)
        shape = (TargetKind.EXPERTS, HIDDEN, INNER, EXPERTS)
        made.append(Target(name, 0, "w13", *shape, other_names=names))
    targets = [target for target in layout.targets if target.name != W1]
    layout = dataclasses.replace(layout, targets=(*targets[:7], *made, *targets[7:]))
    validate(layout)
    saved = Saved(tmp_path / "fused", {"a": torch.randn(2, HIDDEN), "b": torch.randn(2 * INNER, 2)})
    matrices = {name: Matrix.of(record) for name, record in saved.records.items()}
    pairs = {3: (matrices["a"], matrices["b"])}
    experts = ExpertWeights(
        *(fused, fused, 8.0, SCALE, EXPERTS, pairs, tuple(saved.records.items()))
    )
    for held, ranks in ((None, [0, 0, 0, 2]), ((0, 2), [0, 0])):
        targets = [
            dataclasses.replace(target, expert_slice=held) if target in made else target
            for target in layout.targets
        ]
        cut = dataclasses.replace(layout, targets=tuple(targets))
        validate(cut)
        segments = compile_image(saved.checkpoint(experts), cut).plan.segments
        assert [segment.rank for segment in segments] == [max(ranks)] * 4
        a, b, other_a, other_b = segments
        assert a.offset == other_a.offset
        assert len({a.offset, b.offset, other_b.offset}) == 3


@pytest.mark.parametrize("saved_as", [torch.bfloat16, torch.float32])
def test_base_tensors_that_are_equal_are_dropped(tmp_path, saved_as):
    """Also those that were saved wider; of others, blocks that differ and rows of added tokens."""
    torch.manual_seed(2)
    base = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
    fields = {"base_hashes": hashes_of(base), "base_dtype": DataType.BFLOAT16}
    layout = change(layout_of(), HEAD, **fields)

    def compiled(folder: str, weight: torch.Tensor) -> dict[tuple[str, SegmentKind], torch.Tensor]:
        saved = Saved(tmp_path / folder, {"head": weight.to(saved_as), **pair(Q, 2, HIDDEN, 32)})
        head = Replacement(HEAD, HEAD, TargetKind.LINEAR, saved.records["head"])
        checkpoint = saved.checkpoint(saved.lora(Q), head, digest=folder)
        found = values_of(compile_image(checkpoint, layout), layout)
        return {key: value for key, value in found.items() if key[0] == HEAD}

    assert compiled("equal", base) == {}
    changed = base.clone()
    changed[300, 5] += 1
    found = compiled("one block", changed)
    assert found[HEAD, SegmentKind.ROW_IDS].tolist() == list(range(256, 512))
    assert found[HEAD, SegmentKind.ROWS].equal(changed[256:512].float())
    longer = torch.cat([base, torch.ones(2, HIDDEN, dtype=torch.bfloat16)])
    found = compiled("longer", longer)
    assert found[HEAD, SegmentKind.ROW_IDS].tolist() == [600, 601]
    assert found[HEAD, SegmentKind.ROWS].equal(torch.ones(2, HIDDEN))
    other = compiled("other", base + 1)
    assert other.keys() == {(HEAD, SegmentKind.FULL)}


def test_a_copy_that_narrowing_would_change_is_kept(tmp_path):
    base = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
    saved = Saved(tmp_path / "wide", {"head": base.float() * (1 + 2**-20)})
    fields = {"base_hashes": hashes_of(base), "base_dtype": DataType.BFLOAT16}
    layout = change(layout_of(), HEAD, **fields)
    head = Replacement(HEAD, HEAD, TargetKind.LINEAR, saved.records["head"])
    image = compile_image(saved.checkpoint(head, digest="wide"), layout)
    assert (HEAD, SegmentKind.FULL) in values_of(image, layout)


def test_an_image_may_be_empty(tmp_path):
    """Everything is computed elsewhere, or by nobody."""
    saved = Saved(tmp_path / "away", {**pair(Q, 2, HIDDEN, 32), **pair("vision.proj", 2, 8, 8)})
    layout = change(layout_of(), Q, held=Held.ELSEWHERE)
    image = compile_image(saved.checkpoint(saved.lora(Q), saved.lora("vision.proj")), layout)
    assert (image.plan.total_bytes, image.plan.segments, image.parts) == (0, (), ())
    assert image.plan.unused == (("vision", "vision.proj"),)
    assert content_of(image.plan, layout).unused_spaces == ("vision",)
    write_image(tmp_path / "image", image)
    assert read_image(tmp_path / "image", image.plan).sha256 == hashlib.sha256().digest()


def test_what_another_rank_holds_is_checked_too(tmp_path):
    saved = Saved(tmp_path / "away", pair(Q, 2, HIDDEN + 1, 32))
    layout = change(layout_of(), Q, held=Held.ELSEWHERE)
    with pytest.raises(IncompatibleAdapter, match="33 in_features"):
        compile_image(saved.checkpoint(saved.lora(Q)), layout)


def test_a_target_of_the_adapters_own_size(tmp_path):
    """A classifier's head has as many outputs as the adapter says."""
    saved = Saved(tmp_path / "own", pair("score", 2, HIDDEN, 7))
    layout = layout_of()
    score = linear("score", HIDDEN, 0, layer=None)
    layout = dataclasses.replace(layout, targets=(*layout.targets, score))
    validate(layout)
    values = values_of(compile_image(saved.checkpoint(saved.lora("score")), layout), layout)
    assert values["score", SegmentKind.B].shape == (2, 7)

    saved = Saved(tmp_path / "whole", {"score": torch.randn(7, HIDDEN)})
    whole = Replacement("score", "score", TargetKind.LINEAR, saved.records["score"])
    values = values_of(compile_image(saved.checkpoint(whole), layout), layout)
    assert values["score", SegmentKind.FULL].equal(saved.tensors["score"])
    assert values.keys() == {("score", SegmentKind.FULL)}


REFUSED = {
    "TARGET_TWICE": lambda saved: (saved.lora(Q), saved.lora(QKV)),
    "TARGET_UNKNOWN": lambda saved: (dataclasses.replace(saved.lora(Q), name="model.other"),),
    "KIND_MISMATCH": lambda saved: (
        Replacement(NORM, NORM, TargetKind.LINEAR, saved.records["norm"]),
    ),
    "SHAPE_MISMATCH": lambda saved: (dataclasses.replace(saved.lora(QKV), name=GATE_UP),),
    "SHAPE_MISMATCH bias": lambda saved: (saved.lora(QKV, bias="norm"),),
    "SHAPE_MISMATCH rows": lambda saved: (
        Replacement(EMBEDDING, EMBEDDING, TargetKind.EMBEDDING, saved.records["rows"], (7, 9)),
    ),
    "SHAPE_MISMATCH full": lambda saved: (
        Replacement(HEAD, HEAD, TargetKind.LINEAR, saved.records["rows"]),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_place_is_refused_by_name(everything, case):
    with pytest.raises(IncompatibleAdapter) as caught:
        compile_image(everything.checkpoint(*REFUSED[case](everything)), layout_of())
    assert caught.value.reason == case.partition(" ")[0]
    assert caught.value.subject in everything.records


def test_format_1_has_no_place_for_what_is_new(everything):
    """The server that asks is of an earlier release."""
    plain = dataclasses.replace(layout_of(), image_format=1, targets=layout_of().targets[2:4])
    checkpoint = everything.checkpoint(everything.lora(QKV, bias="bias"))
    with pytest.raises(IncompatibleAdapter, match="upgrade it") as caught:
        compile_image(checkpoint, plain)
    assert caught.value.reason == "FORMAT_TOO_OLD"


def sliced(layout: Layout, rank: int, count: int) -> Layout:
    """Returns what one of several ranks holds: outputs of q, k, v, gate and up, inputs of none,
    experts, the vocabulary; of the head's A a part of the rank."""

    def part(size: int) -> tuple[int, int]:
        return rank * size // count, (rank + 1) * size // count

    targets = []
    for target in layout.targets:
        fields: dict[str, Any] = {}
        if target.kind is TargetKind.EMBEDDING:
            fields["in_slice"] = part(target.in_features)
        elif target.kind is TargetKind.EXPERTS and count <= EXPERTS:
            fields["expert_slice"] = part(target.experts)
        elif target.name in (Q, K, V, GATE, UP):
            fields["out_slice"] = part(target.out_features)
        elif target.name == HEAD:
            fields["rank_part"] = (rank, count)
        targets.append(dataclasses.replace(target, **fields))
    cut = dataclasses.replace(layout, targets=tuple(targets))
    validate(cut)
    return cut


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_parts_of_all_ranks_are_the_whole(everything, count):
    saved, whole = everything, layout_of()
    tensors = {**saved.tensors, **pair(HEAD, 6, HIDDEN, VOCAB)}
    saved = Saved(saved.folder.parent / "cut", tensors)
    checkpoint = saved.checkpoint(
        saved.lora(QKV, bias="bias", magnitude="magnitude"),
        saved.lora(GATE_UP),
        saved.lora(EMBEDDING, TargetKind.EMBEDDING),
        saved.lora(HEAD),
        parameter(saved, f"{W1}_turned"),
        Replacement(EMBEDDING, EMBEDDING, TargetKind.EMBEDDING, saved.records["rows"], (7, 9, 511)),
    )
    wanted = values_of(compile_image(checkpoint, whole), whole)
    layouts = [sliced(whole, rank, count) for rank in range(count)]
    assert len({layout_id(each) for each in layouts}) == count
    found = [values_of(compile_image(checkpoint, each), each) for each in layouts]
    for (name, kind), value in wanted.items():
        parts = [each[name, kind] for each in found if (name, kind) in each]
        if name == W1:
            size = HIDDEN if kind is SegmentKind.A else INNER
            if count <= EXPERTS:
                matrices = [m for part in parts for m in held_experts(part, size, count)]
                assert all(map(torch.equal, matrices, experts_of(value, size)))
            continue
        is_joined_by_rows = kind in (SegmentKind.ROWS, SegmentKind.ROW_IDS) or (
            kind is SegmentKind.A and name in (HEAD, EMBEDDING)
        )
        if is_joined_by_rows:
            assert torch.cat(parts, 0).equal(value)
        elif kind is SegmentKind.A or name in (EMBEDDING, HEAD):
            assert len(parts) == count
            assert all(part.equal(value) for part in parts)
        else:
            assert torch.cat(parts, -1).equal(value)


def test_parts_of_cut_inputs_lie_alike(everything):
    """Each has the whole bias and magnitude: a server adds the bias on one of its ranks."""
    saved = everything
    checkpoint = saved.checkpoint(saved.lora(QKV, bias="bias", magnitude="magnitude"))
    layout, cuts = layout_of(), []
    for part in ((0, HIDDEN // 2), (HIDDEN // 2, HIDDEN)):
        targets = [
            dataclasses.replace(target, in_slice=part) if target.name in SIZES else target
            for target in layout.targets
        ]
        cuts.append(dataclasses.replace(layout, targets=tuple(targets)))
    images = [compile_image(checkpoint, each) for each in cuts]
    assert images[0].plan.segments == images[1].plan.segments
    whole = values_of(compile_image(checkpoint, layout), layout)
    for image, cut in zip(images, cuts, strict=True):
        values = values_of(image, cut)
        for kind in (SegmentKind.BIAS, SegmentKind.MAGNITUDE):
            assert values[Q, kind].equal(whole[Q, kind])


def held_experts(segment: torch.Tensor, num_features: int, count: int) -> list[torch.Tensor]:
    num_held = EXPERTS // count
    index = segment[: 16 * num_held].view(torch.int32).view(num_held, 4)
    floats = segment.view(torch.float32)
    return [
        floats[granule * 64 : granule * 64 + rank * num_features].view(rank, num_features)
        for granule, rank in index[:, :2].tolist()
    ]


def test_a_layout_with_every_field_has_one_form():
    layout = change(
        layout_of(),
        HEAD,
        base_hashes=tuple(bytes([n]) * 32 for n in range(3)),
        base_dtype=DataType.BFLOAT16,
        rank_part=(1, 2),
        out_slice=(0, 300),
    )
    text = to_text(layout)
    assert from_text(text) == dataclasses.replace(layout, base_model="")
    assert layout_id(from_text(text)) == layout_id(layout)
    renamed = dataclasses.replace(layout, base_model="another/name")
    assert layout_id(renamed) == layout_id(layout)


def test_identity_of_format_2_follows_everything():
    layout = layout_of()
    changes: list[dict[str, Any]] = [
        {"space": "vision"},
        {"held": Held.ELSEWHERE},
        {"rank_part": (0, 2)},
        {"other_names": (OtherName("x"),)},
        {"other_names": (OtherName("x", transposed=True),)},
        {"base_hashes": (b"1" * 32,) * 3, "base_dtype": DataType.FLOAT32},
        {"base_hashes": (b"1" * 32,) * 3, "base_dtype": DataType.FLOAT16},
        {"in_slice": (0, 1)},
        {"out_slice": (0, 1)},
    ]
    ids = {layout_id(change(layout, HEAD, **each)) for each in changes}
    experts = {layout_id(change(layout, W1, expert_slice=part)) for part in ((0, 2), (2, 4))}
    assert len(ids | experts | {layout_id(layout)}) == len(changes) + 3


def test_plain_adapters_have_the_bytes_of_format_1(everything):
    first = dataclasses.replace(
        layout_of(),
        image_format=1,
        targets=tuple(
            dataclasses.replace(target, other_names=(), space="")
            for target in layout_of().targets
            if target.kind is TargetKind.LINEAR and target.held is Held.HERE
        ),
    )
    checkpoint = everything.checkpoint(everything.lora(Q))
    images = [compile_image(checkpoint, layout) for layout in (first, layout_of())]
    assert images[0].buffer.equal(images[1].buffer)
    assert images[0].plan.image_id != images[1].plan.image_id
    assert np.array_equal(images[0].buffer.numpy(), images[1].buffer.numpy())
