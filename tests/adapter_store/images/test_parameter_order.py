"""Which of inputs and outputs A of a parameter has where both are of one size: as PEFT has it in
each of its releases, by the version in the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.open import open_checkpoint
from tests.support.store.checkpoints import WEIGHTS, edit, refusal
from tests.support.store.peft_models import (
    DOWN,
    EXPERTS,
    GATE,
    HIDDEN,
    WIDTH,
    A,
    adapt,
    compiled,
    deltas_of,
    module,
    moe,
    moe_layout,
)

pytestmark = pytest.mark.matrix

SQUARE = HIDDEN
OUTSIDE_A = f"base_model.model.{EXPERTS}.lora_A.weight"
SWAPS: dict[str, Callable[[bool], bool]] = {
    "0.17.1": lambda _: False,
    "0.18.1": lambda _: False,
    "0.19.0": lambda is_transposed: is_transposed,
    "0.19.1": lambda is_transposed: not is_transposed,
    "0.21.2": lambda is_transposed: not is_transposed,
}
"""Whether PEFT of this version takes the second dimension of a parameter for its inputs."""
KINDS = {"qwen3": False, "gptoss": True}
"""Whether the models have their parameters as [experts, in, out]."""


def save(
    folder: Path,
    kind: str,
    *,
    swaps: bool,
    names: tuple[str, ...] = ("down_proj",),
    width: int = SQUARE,
    **fields: Any,
) -> Any:
    """Saves an adapter as a PEFT that swaps or not, which the installed one does by what the module
    says of itself. `fields` change the config; None removes one."""
    model = moe(kind, width)
    model.get_submodule(EXPERTS).is_transposed = not swaps
    options = {"target_parameters": [f"mlp.experts.{name}" for name in names]}
    adapted = adapt(folder, model, target_modules=[], **options)
    edit(folder, **fields)
    return adapted


def added(adapted: Any, kind: str) -> torch.Tensor:
    """Returns what PEFT adds to down_proj of each expert, [experts, out, in]."""
    delta = module(adapted, EXPERTS).get_delta_weight("default").detach()
    found: torch.Tensor = delta.mT if KINDS[kind] else delta
    return found


def compiled_down(folder: Path, kind: str, width: int = SQUARE) -> torch.Tensor:
    _, values = compiled(folder, moe_layout(kind, width))
    return torch.stack(deltas_of(values, DOWN, width, HIDDEN))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", SWAPS)
def test_a_square_parameter_is_that_of_its_pefts_version(tmp_path, version, kind):
    adapted = save(tmp_path, kind, swaps=SWAPS[version](KINDS[kind]), peft_version=version)
    torch.testing.assert_close(compiled_down(tmp_path, kind), added(adapted, kind))


def digests_of(folder: Path, versions: tuple[str | None, ...]) -> list[str]:
    found = []
    for version in versions:
        edit(folder, peft_version=version)
        found.append(open_checkpoint(folder).digest)
    return found


def test_what_the_version_decides_is_of_the_digest(tmp_path):
    save(tmp_path, "qwen3", swaps=True)
    digests = digests_of(tmp_path, tuple(SWAPS))
    assert [digests.index(each) for each in digests] == [0, 0, 2, 3, 3]
    image = compiled_down(tmp_path, "qwen3")
    edit(tmp_path, peft_version="0.18.1")
    assert not compiled_down(tmp_path, "qwen3").equal(image)


def test_what_sizes_decide_is_not_of_the_digest(tmp_path):
    adapted = save(tmp_path, "qwen3", swaps=True, width=WIDTH)
    assert len(set(digests_of(tmp_path, (*SWAPS, None)))) == 1
    torch.testing.assert_close(compiled_down(tmp_path, "qwen3", WIDTH), added(adapted, "qwen3"))


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_other_parameter_of_a_module_tells(tmp_path, kind, swaps):
    """Whatever the version: Transformers before 5 does not say what PEFT looks for."""
    adapted = save(tmp_path, kind, swaps=swaps, names=("gate_up_proj", "down_proj"))
    assert len(set(digests_of(tmp_path, (*SWAPS, "0.19.1.dev0", None)))) == 1
    torch.testing.assert_close(compiled_down(tmp_path, kind), added(adapted, kind))


def test_the_config_may_name_parameters_in_any_order(tmp_path):
    names = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    save(tmp_path, "qwen3", swaps=True, names=("gate_up_proj", "down_proj"), width=WIDTH)
    found = []
    for order in (names, names[::-1]):
        edit(tmp_path, target_parameters=order)
        found.append(open_checkpoint(tmp_path).digest)
    assert found[0] == found[1]
    _, values = compiled(tmp_path, moe_layout("qwen3"))
    assert (GATE, A) in values


UNKNOWN: tuple[Any, ...] = (
    *(None, "", 0.18, 18, ["0.18.1"], {"0.18.1": 1}, True),
    *("18", "v0.18.1", "0.18.1 ", "0.18.1\n", "0.18.1/..", "\u0660.\u0661\u0668.\u0660"),
    *("0.18.1.dev0@UNKNOWN", "0.19.0.dev0@0123abc", "0.19.1rc1", "0.19.0+local"),
    *("0" * 100_000, "0.18.1." + "1" * 100_000, "0.18." + "9" * 5_000),
)


@pytest.mark.parametrize("version", UNKNOWN, ids=lambda value: repr(value)[:20])
def test_without_a_version_of_a_release_it_is_refused_by_name(tmp_path, version):
    save(tmp_path, "qwen3", swaps=True, peft_version=version)
    error = refusal(tmp_path)
    assert (error.reason, error.subject) == ("CONFIG_UNSUPPORTED", OUTSIDE_A)
    assert f"{EXPERTS}.down_proj has as many inputs as outputs" in error.message
    assert 'write the version that it was trained with, such as "peft_version": ' in error.message


@pytest.mark.parametrize(
    ("version", "like"),
    [
        *(("0.17", "0.17.1"), ("0.18.0.dev0@0123abc", "0.18.1"), ("0.19", "0.19.0")),
        *(("0.19.2.dev0@UNKNOWN", "0.21.2"), ("0.21.2+local", "0.21.2"), ("1.0.0", "0.21.2")),
    ],
)
def test_versions_that_are_like_a_release(tmp_path, version, like):
    save(tmp_path, "qwen3", swaps=True)
    digests = digests_of(tmp_path, (version, like))
    assert digests[0] == digests[1]


def swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters outside and inside have changed places."""
    inside = ".experts.base_layer."
    return {
        key.replace(inside, ".experts.")
        if inside in key
        else key.replace(".experts.", inside): value
        for key, value in tensors.items()
    }


def other_way(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A and B of the outer one have changed places, and so its order is not that of the inner."""
    a, b = (OUTSIDE_A.replace("_A", side) for side in ("_A", "_B"))
    experts = 4
    first = tensors[a].view(experts, -1, tensors[a].shape[1])
    second = tensors[b].view(len(tensors[b]), -1, experts)
    return tensors | {
        a: second.permute(2, 1, 0).flatten(0, 1),
        b: first.permute(2, 1, 0).flatten(1),
    }


def fewer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outer parameter is of three experts."""
    a, b = (OUTSIDE_A.replace("_A", side) for side in ("_A", "_B"))
    rank = tensors[a].shape[0] // 4
    return tensors | {a: tensors[a][: 3 * rank], b: tensors[b][:, : 3 * rank]}


@pytest.mark.parametrize("change", [swapped, other_way, fewer])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_contradict_each_other_are_refused_by_name(tmp_path, kind, change):
    """When they are registered, before any layout is known."""
    save(tmp_path, kind, swaps=not KINDS[kind], names=("gate_up_proj", "down_proj"), width=WIDTH)
    open_checkpoint(tmp_path)
    tensors = {key: each.clone() for key, each in change(load_file(tmp_path / WEIGHTS)).items()}
    save_file({key: each.contiguous() for key, each in tensors.items()}, tmp_path / WEIGHTS)
    error = refusal(tmp_path)
    assert (error.reason, error.subject) == ("SHAPE_INVALID", OUTSIDE_A)
    assert "are not the shapes of one mixture of experts" in error.message
