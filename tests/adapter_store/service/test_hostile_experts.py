"""Adapters of experts that a server's mixture cannot serve: each is recorded, its verdict names the
tensor, and a pull ends with the same words."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.store.checkpoints import WEIGHTS, edit
from tests.support.store.client import Client
from tests.support.store.trained_experts import (
    EXPERTS,
    FOLDERS,
    HIDDEN,
    INNER,
    PREFIX,
    RANK,
    SAME,
    layout,
    stacks,
)

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]
MODULES = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def client(serve_shared: Callable[..., Any]) -> Client:
    """A store that knows a server of the mixture."""
    found: Client = serve_shared().client
    return found


@pytest.fixture
def layout_id(client: Client) -> str:
    return client.register_layout(layout())


def scaled(num_experts: int) -> Change:
    """Leaves so many experts in each stack."""
    return lambda found: {key: each[:num_experts].clone() for key, each in found.items()}


def parameters_of(num_experts: int) -> Change:
    """Leaves so many experts in each parameter."""

    def left(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".lora_A." in key:
            return tensor[: num_experts * RANK].clone()
        return tensor.view(len(tensor), RANK, EXPERTS)[..., :num_experts].flatten(1).contiguous()

    return lambda found: {key: left(key, each) for key, each in found.items()}


def more(tensors: Tensors) -> Change:
    return lambda _: tensors


def single(name: str, num_in: int = INNER) -> Tensors:
    return stacks(RANK, num_in, b=(HIDDEN, RANK), key=f"{PREFIX}.{name}.lora_")


BOTH = f"{PREFIX}.gate_up_proj.lora_"
GATE_UP = stacks(EXPERTS, RANK, HIDDEN, b=(EXPERTS, 2 * INNER, RANK), key=BOTH)
EXPERT = "model.layers.0.mlp.experts"
CASES: dict[str, tuple[str, Change, dict[str, Any], str, str]] = {
    "fewer experts in stacks": (
        *("experts_tinker", scaled(3), {}),
        *("w2.lora_A.weight", f"3 experts, {EXPERT}.down_proj has 4"),
    ),
    "fewer experts in parameters": (
        *("experts_parameters", parameters_of(2), {}),
        *("experts.lora_A.weight", f"2 experts, {EXPERT}.down_proj has 4"),
    ),
    "twice the rank, and half the experts": (
        *("experts_parameters", more({}), {"r": 2 * RANK}),
        *("experts.lora_A.weight", f"2 experts, {EXPERT}.down_proj has 4"),
    ),
    "one expert more": (
        *("experts_apart", more(single("4.down_proj")), {}),
        *("4.down_proj.lora_A.weight", f"of expert 4, {EXPERT}.down_proj has 4"),
    ),
    "a module that no expert has": (
        *("experts_apart", more(single("0.w9")), {"target_modules": [*MODULES, "w9"]}),
        *("0.w9.lora_A.weight", f"has no {EXPERT}.0.w9"),
    ),
    "gate and up twice": (
        *("experts_apart", more(GATE_UP), {"target_modules": [*MODULES, "gate_up_proj"]}),
        *("0.gate_proj.lora_A.weight", f"{EXPERT}.gate_up_proj changes {EXPERT}.gate_proj, too"),
    ),
    "A of other inputs": (
        *("experts_tinker", more(stacks(EXPERTS, RANK, 5, b=(EXPERTS, HIDDEN, RANK))), {}),
        *("w2.lora_A.weight", "has 5 in_features"),
    ),
    "A of one expert of other inputs": (
        *("experts_apart", more(single("3.down_proj", 5)), {}),
        *("3.down_proj.lora_A.weight", "has 5 in_features"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_mixture_has_not_is_named(
    client: Client, layout_id: str, shared_folder: Path, refused: Any, case: str
) -> None:
    trainer, change, fields, subject, words = CASES[case]
    name = f"case-{list(CASES).index(case)}"
    folder = Path(shutil.copytree(FOLDERS / trainer, shared_folder / name))
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | change(tensors), folder / WEIGHTS)
    edit(folder, **fields)
    digest = client.register(name, folder, base_model="org/tiny").adapter.digest
    texts = (f"{subject}: ", words)
    with refused("FAILED_PRECONDITION", *texts):
        client.pull(digest, layout_id)
    [state] = client.get(digest).layout_states
    assert state.state == pb.IMAGE_STATE_INCOMPATIBLE
    assert all(text in state.reason for text in texts)


@pytest.mark.parametrize("trainer", [*SAME, "experts_parameters"])
def test_every_form_is_served(
    client: Client, layout_id: str, shared_folder: Path, trainer: str
) -> None:
    folder = Path(shutil.copytree(FOLDERS / trainer, shared_folder / trainer))
    digest = client.register(trainer.replace("_", "-"), folder, base_model="org/tiny").adapter
    assert client.pull(digest.digest, layout_id).is_whole


def test_experts_that_one_by_one_lacks_stay_the_bases(
    client: Client, layout_id: str, shared_folder: Path
) -> None:
    """Pruned where they changed nothing: the image has rank 0 of these."""
    folder = Path(shutil.copytree(FOLDERS / "experts_apart", shared_folder / "fewer"))
    tensors = load_file(folder / WEIGHTS)
    kept = {key: each for key, each in tensors.items() if ".experts.2." not in key}
    assert len(kept) == len(tensors) * 3 // 4
    save_file(kept, folder / WEIGHTS)
    copy = Path(shutil.copytree(FOLDERS / "experts_apart", shared_folder / "whole"))
    whole = client.register("whole", copy, base_model="org/tiny").adapter
    fewer = client.register("fewer", folder, base_model="org/tiny").adapter
    sizes = [len(client.pull(each.digest, layout_id).data) for each in (fewer, whole)]
    assert sizes[0] < sizes[1]
