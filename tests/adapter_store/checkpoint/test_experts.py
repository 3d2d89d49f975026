"""Experts of a mixture in every form: each yields the same image, and hostile forms are refused by
name. `trainers/make.py` made the folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.compile import Image, compile_image
from contract.adapter_files import MLX_WEIGHTS_FILE
from contract.images.dtypes import DataType
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from tests.support.store.checkpoints import CONFIG, WEIGHTS, refusal
from tests.support.store.format_2 import values_of
from tests.support.store.trained_experts import (
    EXPERTS,
    FOLDERS,
    HIDDEN,
    INNER,
    MODULE,
    PREFIX,
    RANK,
    SAME,
    SCALE,
    SIZES,
    W1,
    W2,
    W3,
    layout,
    stacks,
)

TINKERS = {"gate": "w1", "up": "w3", "down": "w2"}

Tensors = Mapping[str, torch.Tensor]


def image_of(checkpoint: Checkpoint | Path, of: Layout | None = None) -> Image:
    if isinstance(checkpoint, Path):
        checkpoint = open_checkpoint(checkpoint)
    return compile_image(checkpoint, of or layout())


def matrices_of(folder: Path, of: Layout | None = None) -> dict[tuple[str, int], torch.Tensor]:
    """Returns what is added to each expert's weight, [out, in], by the part and the expert."""
    of = of or layout()
    values = values_of(image_of(folder, of), of)
    found = {}
    for (name, (num_in, num_out)), target in zip(SIZES.items(), of.targets, strict=True):
        if (target.name, SegmentKind.A) not in values:
            continue
        a, b = (
            _experts(values[target.name, kind], size, target.experts)
            for kind, size in ((SegmentKind.A, num_in), (SegmentKind.B, num_out))
        )
        found |= {(name, expert): b[expert].T @ a[expert] for expert in range(target.experts)}
    return found


def _experts(segment: torch.Tensor, num_features: int, num_experts: int) -> list[torch.Tensor]:
    index = segment[: 16 * num_experts].view(torch.int32).view(num_experts, 4)
    floats = segment.view(torch.float32)
    return [
        floats[granule * 64 : granule * 64 + rank * num_features].view(rank, num_features)
        for granule, rank in index[:, :2].tolist()
    ]


def deltas() -> dict[tuple[str, int], torch.Tensor]:
    """Returns the same, of Tinker's file by its definition."""
    tensors = load_file(FOLDERS / "experts_tinker" / WEIGHTS)
    found = {}
    for name, theirs in TINKERS.items():
        a, b = (tensors[f"{PREFIX}.{theirs}.lora_{side}.weight"] for side in "AB")
        for expert in range(EXPERTS):
            found[name, expert] = SCALE * b[expert] @ a[expert]
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """Copies a trainer's folder, with tensors changed (None: removed), and fields of the config."""

    def make(
        trainer: str, changed: Mapping[str, torch.Tensor | None] | None = None, **fields: Any
    ) -> Path:
        folder = Path(
            shutil.copytree(FOLDERS / trainer, tmp_path / f"{len(list(tmp_path.iterdir()))}")
        )
        path = folder / (MLX_WEIGHTS_FILE if "mlx" in trainer else WEIGHTS)
        tensors = {**load_file(path), **(changed or {})}
        save_file({key: value for key, value in tensors.items() if value is not None}, path)
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | fields))
        return folder

    return make


@pytest.mark.parametrize("options", [{}, {"expert_slice": (1, 3)}], ids=["all", "two"])
@pytest.mark.parametrize("trainer", SAME)
def test_every_form_yields_the_same_image(trainer: str, options: dict[str, Any]) -> None:
    of = layout(**options)
    expected = image_of(FOLDERS / "experts_tinker", of)
    assert expected.plan.total_bytes
    image = image_of(FOLDERS / trainer, of)
    assert image.plan.segments == expected.plan.segments
    assert image.buffer.equal(expected.buffer)


@pytest.mark.parametrize("trainer", [*SAME, "experts_parameters"])
def test_every_form_computes_what_tinker_defines(trainer: str) -> None:
    found = matrices_of(FOLDERS / trainer)
    assert found.keys() == deltas().keys()
    for key, value in deltas().items():
        torch.testing.assert_close(found[key], value)


def test_a_parameter_is_the_same_image_where_it_can_be(copy: Callable[..., Path]) -> None:
    """Of down, which no other projection shares A with."""
    ours = copy("experts_tinker", {f"{key}{s}.weight": None for key in (W1, W3) for s in "AB"})
    inner = {f"{PREFIX}.base_layer.lora_{side}.weight": None for side in "AB"}
    theirs = copy("experts_parameters", inner, target_parameters=["mlp.experts.down_proj"])
    images = [image_of(folder) for folder in (ours, theirs)]
    assert images[0].buffer.equal(images[1].buffer)
    assert images[0].plan.segments == images[1].plan.segments


DIGESTS = {  # made with hashlib from the format's text, without this code
    "experts_tinker": "sha256:e2ca0f085d1f60c73e366f9f4d066cfcbed28d7e5c867300ec7895a59ea7ecdf",
    "experts_mlx": "sha256:27a14bc274ce41d49e74a9da6e7b17513d37bbb573d935a3bbbec7debdaae0f7",
    "experts_apart": "sha256:32750ebcf5853129ff9c9f0d2a73c93d1479904ee181bd53f4f72fd4a188a76a",
}


@pytest.mark.parametrize("trainer", DIGESTS)
def test_the_digest_of_experts(trainer: str) -> None:
    assert open_checkpoint(FOLDERS / trainer).digest == DIGESTS[trainer]


def test_an_a_of_all_experts_lies_there_once(copy: Callable[..., Path]) -> None:
    """As Tinker saves it, and Megatron-Bridge, which has gate and up in one tensor."""
    tensors = load_file(FOLDERS / "experts_tinker" / WEIGHTS)
    shared = {f"{key}A.weight": tensors[f"{key}A.weight"][:1].clone() for key in (W1, W3)}
    shared[f"{W2}B.weight"] = tensors[f"{W2}B.weight"][:1].clone()
    repeated = {key: value.repeat(EXPERTS, 1, 1) for key, value in shared.items()}
    once, all_of_them = (copy("experts_tinker", each) for each in (shared, repeated))
    found, expected = matrices_of(once), matrices_of(all_of_them)
    assert all(found[key].equal(value) for key, value in expected.items())
    saved = image_of(all_of_them).plan.total_bytes - image_of(once).plan.total_bytes
    assert saved == 3 * (EXPERTS - 1) * 256  # each matrix begins on 256 bytes

    fused = {
        f"{PREFIX}.gate_up_proj.lora_A.weight": shared[f"{W1}A.weight"],
        f"{PREFIX}.gate_up_proj.lora_B.weight": torch.cat(
            [tensors[f"{W1}B.weight"], tensors[f"{W3}B.weight"]], 1
        ),
        f"{PREFIX}.down_proj.lora_A.weight": tensors[f"{W2}A.weight"],
        f"{PREFIX}.down_proj.lora_B.weight": shared[f"{W2}B.weight"],
    }
    modules = ["gate_up_proj", "down_proj"]
    of_megatron = copy(
        "experts_tinker", {**dict.fromkeys(tensors), **fused}, target_modules=modules
    )
    found = matrices_of(of_megatron)
    assert all(found[key].equal(value) for key, value in expected.items())


def test_mlx_before_0_29_has_the_a_of_experts_one_behind_another(
    copy: Callable[..., Path],
) -> None:
    tensors = load_file(FOLDERS / "experts_mlx" / MLX_WEIGHTS_FILE)
    flat = {key: each.flatten(0, 1) for key, each in tensors.items() if key.endswith("lora_a")}
    folder = copy("experts_mlx", flat)
    assert image_of(folder).buffer.equal(image_of(FOLDERS / "experts_mlx").buffer)
    assert open_checkpoint(folder).digest != open_checkpoint(FOLDERS / "experts_mlx").digest
    (key, value), *_ = flat.items()
    folder = copy("experts_mlx", {**flat, key: value[:-1].clone()})
    assert (refusal(folder).reason, refusal(folder).subject) == ("RANK_MISMATCH", key)


@pytest.mark.parametrize("trainer", [*SAME, "experts_parameters"])
def test_a_model_may_have_other_names_for_its_projections(trainer: str) -> None:
    """w1, w2 and w3, as Mixtral's do; fused parameters are named by the layout."""
    of = layout(TINKERS)
    found = image_of(FOLDERS / trainer, of).buffer
    assert found.equal(image_of(FOLDERS / trainer).buffer)


def test_a_blob_is_hashed_as_it_is_compiled() -> None:
    for trainer in (*SAME, "experts_parameters"):
        digest = open_checkpoint(FOLDERS / trainer).digest
        again = open_checkpoint(FOLDERS / trainer, digest=digest)
        assert not again.is_verified
        assert image_of(again).buffer.equal(image_of(FOLDERS / trainer).buffer)
        wrong = open_checkpoint(FOLDERS / trainer, digest="sha256:" + "0" * 64)
        with pytest.raises(Exception, match="no longer has this digest"):
            image_of(wrong)


def test_ranks_and_scales_of_experts_may_differ(copy: Callable[..., Path]) -> None:
    """One by one, PEFT's patterns tell; an expert that the adapter lacks has rank 0."""
    key = f"{PREFIX}.1.down_proj.lora_"
    changed: dict[str, torch.Tensor | None] = {
        f"{key}A.weight": torch.ones(3, INNER),
        f"{key}B.weight": torch.ones(HIDDEN, 3),
        **{f"{PREFIX}.2.down_proj.lora_{side}.weight": None for side in "AB"},
    }
    patterns = {"rank_pattern": {"experts.1.down_proj": 3}, "alpha_pattern": {"1.down_proj": 30}}
    found = matrices_of(copy("experts_apart", changed, **patterns))
    assert found["down", 1].equal(torch.full((HIDDEN, INNER), 30.0))
    assert not found["down", 2].any()
    for key_of, value in deltas().items():
        if key_of not in (("down", 1), ("down", 2)):
            torch.testing.assert_close(found[key_of], value)


def test_experts_that_are_targets_of_their_own_stay_what_they_were() -> None:
    """A layout may have each expert's matrix as one, as those of format 1 do."""
    targets = [
        Target(f"{MODULE}.{expert}.{name}_proj", 0, f"{name}{expert}", TargetKind.LINEAR, *size)
        for expert in range(EXPERTS)
        for name, size in SIZES.items()
    ]
    of = Layout("org/tiny", "0" * 64, DataType.FLOAT32, 1, tuple(targets))
    values = values_of(image_of(FOLDERS / "experts_apart", of), of)
    for (name, expert), value in deltas().items():
        target = f"{MODULE}.{expert}.{name}_proj"
        a, b = values[target, SegmentKind.A], values[target, SegmentKind.B]
        torch.testing.assert_close(b.T @ a, value)


HOSTILE: dict[str, tuple[dict[str, torch.Tensor | None], dict[str, Any], str, str]] = {
    "w1 without w3": (
        {f"{W3}A.weight": None, f"{W3}B.weight": None},
        *({}, "PAIR_INCOMPLETE", f"{W1}A.weight"),
    ),
    "w3 without w1": (
        {f"{W1}A.weight": None, f"{W1}B.weight": None},
        *({}, "PAIR_INCOMPLETE", f"{W3}A.weight"),
    ),
    "A without B": ({f"{W2}B.weight": None}, {}, "PAIR_INCOMPLETE", f"{W2}A.weight"),
    "three of A and four of B": (
        stacks(3, RANK, INNER, b=(4, HIDDEN, RANK)),
        *({}, "SHAPE_INVALID", f"{W2}B.weight"),
    ),
    "one of A and one of B": (
        stacks(1, RANK, INNER, b=(1, HIDDEN, RANK)),
        *({}, "SHAPE_INVALID", f"{W2}A.weight"),
    ),
    "a matrix beside a stack": (
        stacks(RANK, INNER, b=(4, HIDDEN, RANK)),
        *({}, "SHAPE_INVALID", f"{W2}A.weight"),
    ),
    "a stack beside a matrix": (
        stacks(4, RANK, INNER, b=(HIDDEN, RANK)),
        *({}, "SHAPE_INVALID", f"{W2}B.weight"),
    ),
    "another rank of A": (
        stacks(4, 3, INNER, b=(4, HIDDEN, RANK)),
        *({}, "RANK_MISMATCH", f"{W2}A.weight"),
    ),
    "another rank of B": (
        stacks(4, RANK, INNER, b=(4, HIDDEN, 3)),
        *({}, "RANK_MISMATCH", f"{W2}B.weight"),
    ),
    "four dimensions": (
        stacks(1, 4, RANK, INNER, b=(4, HIDDEN, RANK)),
        *({}, "SHAPE_INVALID", f"{W2}A.weight"),
    ),
    "stacks of no experts": (
        stacks(4, RANK, INNER, b=(4, HIDDEN, RANK), key=f"{PREFIX[:-8]}.w2.lora_"),
        *({}, "SHAPE_INVALID", f"{PREFIX[:-8]}.w2.lora_A.weight"),
    ),
    "a stack of an embedding's": (
        {f"{PREFIX}.w4.lora_embedding_A": torch.ones(4, RANK, INNER)},
        *({}, "SHAPE_INVALID", f"{PREFIX}.w4.lora_embedding_A"),
    ),
    "one projection by two names": (
        stacks(4, RANK, INNER, b=(4, HIDDEN, RANK), key=f"{PREFIX}.down_proj.lora_"),
        *({}, "TENSOR_DUPLICATE", f"{W2}A.weight"),
    ),
    "a stack beside single experts": (
        stacks(RANK, INNER, b=(HIDDEN, RANK), key=f"{PREFIX}.3.down_proj.lora_"),
        *({}, "EXPERTS_MIXED", f"{W2}A.weight"),
    ),
    "a stack beside a parameter": (
        stacks(EXPERTS * RANK, INNER, b=(HIDDEN, EXPERTS * RANK), key=f"{PREFIX}.lora_"),
        {"target_parameters": ["experts.down_proj"]},
        *("EXPERTS_MIXED", f"{PREFIX}.lora_A.weight"),
    ),
    "a bias of stacks": (
        {f"{W2}B.bias": torch.ones(HIDDEN)},
        *({}, "TENSOR_UNKNOWN", f"{W2}B.bias"),
    ),
    "DoRA of stacks": (
        {f"{PREFIX}.w1.lora_magnitude_vector": torch.ones(INNER)},
        *({"use_dora": True}, "CONFIG_UNSUPPORTED", f"{W1}A.weight"),
    ),
    "biases of stacks": ({}, {"lora_bias": True}, "CONFIG_UNSUPPORTED", f"{W1}A.weight"),
    "not selected": (
        *({}, {"target_modules": ["w1", "w3"]}),
        *("TARGET_NOT_SELECTED", f"{W2}A.weight"),
    ),
    "140,000 experts": (
        stacks(140_000, RANK, 1, b=(140_000, 1, RANK)),
        *({}, "TOO_MANY_EXPERTS", f"{W2}A.weight"),
    ),
    "an A of all, and 140,000 Bs": (
        stacks(1, RANK, 1, b=(140_000, 1, RANK)),
        *({}, "TOO_MANY_EXPERTS", f"{W2}B.weight"),
    ),
    "140,000 experts in two stacks": (
        {
            **stacks(70_000, RANK, 1, b=(70_000, 1, RANK), key=f"{PREFIX}.a.lora_"),
            **stacks(70_000, RANK, 1, b=(70_000, 1, RANK), key=f"{PREFIX}.b.lora_"),
            **{f"{key}{side}.weight": None for key in (W1, W2, W3) for side in "AB"},
        },
        *({}, "TOO_MANY_EXPERTS", f"{PREFIX}.b.lora_A.weight"),
    ),
}


INDICES = ("-1", "01", "00", "131072", "4294967296", "99999999999999999999")


@pytest.mark.parametrize("index", INDICES)
def test_an_index_that_no_expert_has_is_refused_by_name(
    copy: Callable[..., Path], index: str
) -> None:
    key = f"{PREFIX}.{index}.down_proj.lora_"
    error = refusal(copy("experts_apart", stacks(RANK, INNER, b=(HIDDEN, RANK), key=key)))
    assert (error.reason, error.subject) == ("TENSOR_UNKNOWN", f"{key}A.weight")
    assert f"no mixture has an expert {index}: their numbers are from 0 to" in error.message


def test_one_expert_by_two_names_is_refused_by_name(copy: Callable[..., Path]) -> None:
    modules = ["gate_proj", "up_proj", "down_proj", "w2"]
    key = f"{PREFIX}.0.w2.lora_"
    twice = stacks(RANK, INNER, b=(HIDDEN, RANK), key=key)
    error = refusal(copy("experts_apart", twice, target_modules=modules))
    assert (error.reason, error.subject) == ("TENSOR_DUPLICATE", f"{key}A.weight")
    assert f"{MODULE}.0.down_proj has another tensor for this" in error.message


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_forms_are_refused_by_name(copy: Callable[..., Path], case: str) -> None:
    changed, fields, reason, subject = HOSTILE[case]
    error = refusal(copy("experts_tinker", changed, **fields))
    assert (error.reason, error.subject) == (reason, subject)


def test_a_million_experts_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """The header says how many there are; the file has no byte of them."""
    shutil.copy(FOLDERS / "experts_tinker" / CONFIG, tmp_path)
    records: dict[str, Any] = {}
    position = 0
    for side, shape in (("A", [1_000_000, RANK, 1]), ("B", [1_000_000, 1, RANK])):
        end = position + 4 * RANK * 1_000_000
        records[f"{W2}{side}.weight"] = {
            "dtype": "F32", "shape": shape, "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    header = json.dumps(records).encode()
    with open(tmp_path / WEIGHTS, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)
    assert refusal(tmp_path).reason == "TOO_MANY_EXPERTS"


HOSTILE_OF_MLX = {
    "an A of all": ((1, RANK, INNER), (4, HIDDEN, RANK), "SHAPE_INVALID", "b"),
    "transposed": ((4, INNER, RANK), (4, RANK, HIDDEN), "RANK_MISMATCH", "a"),
    "B of one": ((4, RANK, INNER), (HIDDEN, RANK), "SHAPE_INVALID", "b"),
    "A of three experts": ((3 * RANK, INNER), (4, HIDDEN, RANK), "RANK_MISMATCH", "a"),
}


@pytest.mark.parametrize("case", HOSTILE_OF_MLX)
def test_hostile_forms_of_mlx_are_refused_by_name(copy: Callable[..., Path], case: str) -> None:
    *shapes, reason, side = HOSTILE_OF_MLX[case]
    module = "model.layers.0.mlp.switch_mlp.down_proj"
    changed = {
        f"{module}.lora_{s}": torch.ones(shape) for s, shape in zip("ab", shapes, strict=True)
    }
    error = refusal(copy("experts_mlx", changed))
    assert (error.reason, error.subject) == (reason, f"{module}.lora_{side}")
    assert refusal(copy("experts_mlx", lora_parameters=_only("gate_proj"))).reason == (
        "TARGET_NOT_SELECTED"
    )


def _only(name: str) -> dict[str, Any]:
    config = json.loads((FOLDERS / "experts_mlx" / CONFIG).read_text())
    parameters: dict[str, Any] = config["lora_parameters"]
    return parameters | {"keys": [f"mlp.switch_mlp.{name}"]}


def test_what_does_not_fit_the_model_is_refused_by_name(copy: Callable[..., Path]) -> None:
    key = f"{PREFIX}.4.down_proj.lora_"
    fifth = {f"{key}A.weight": torch.ones(RANK, INNER), f"{key}B.weight": torch.ones(HIDDEN, RANK)}
    gate_up = f"{PREFIX}.gate_up_proj.lora_"
    twice = stacks(EXPERTS, RANK, HIDDEN, b=(EXPERTS, 2 * INNER, RANK), key=gate_up)
    modules = ["gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"]
    unknown = stacks(RANK, INNER, b=(HIDDEN, RANK), key=f"{PREFIX}.0.w9.lora_")
    cases: list[tuple[Path, Layout, str, str]] = [
        (copy("experts_apart", fifth), layout(), "SHAPE_MISMATCH", f"{key}A.weight"),
        (FOLDERS / "experts_tinker", layout(num_experts=5), "SHAPE_MISMATCH", f"{W2}A.weight"),
        (
            *(copy("experts_tinker", twice, target_modules=modules), layout()),
            *("TARGET_TWICE", f"{gate_up}A.weight"),
        ),
        (
            *(copy("experts_apart", unknown, target_modules=[*modules, "w9"]), layout()),
            *("TARGET_UNKNOWN", f"{PREFIX}.0.w9.lora_A.weight"),
        ),
    ]
    for folder, of, reason, subject in cases:
        with pytest.raises(IncompatibleAdapter) as caught:
            image_of(folder, of)
        assert (caught.value.reason, caught.value.subject) == (reason, subject)


def test_vectors_of_single_experts_have_no_place_among_all(copy: Callable[..., Path]) -> None:
    tensors = load_file(FOLDERS / "experts_apart" / WEIGHTS)
    biases = {
        key.replace(".weight", ".bias"): torch.ones(len(value))
        for key, value in tensors.items()
        if "lora_B" in key
    }
    folder = copy("experts_apart", biases, lora_bias=True)
    with pytest.raises(
        IncompatibleAdapter, match="all experts, which have A and B alone"
    ) as caught:
        image_of(folder)
    assert caught.value.reason == "KIND_MISMATCH"
    assert caught.value.subject in biases


def test_a_size_that_differs_is_refused_by_its_tensor() -> None:
    of = layout()
    targets = tuple(
        dataclasses.replace(target, in_features=target.in_features + 1) for target in of.targets
    )
    for trainer in (*SAME, "experts_parameters"):
        with pytest.raises(IncompatibleAdapter) as caught:
            image_of(FOLDERS / trainer, dataclasses.replace(of, targets=targets))
        assert caught.value.reason == "SHAPE_MISMATCH"
        assert ".lora_" in caught.value.subject


def test_records_name_projections_and_formats(copy: Callable[..., Path]) -> None:
    """Whoever called them what."""
    for trainer in SAME:
        checkpoint = open_checkpoint(FOLDERS / trainer)
        assert checkpoint.module_names == ("down_proj", "gate_proj", "up_proj")
        assert checkpoint.rank == RANK
