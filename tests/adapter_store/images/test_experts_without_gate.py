"""Experts of an up and a down projection, as Nemotron-H has them: every form gives one image."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import Image, compile_image
from contract.images.dtypes import DataType
from contract.images.layout_rules import validate
from contract.images.layouts import Layout
from contract.images.targets import Target, TargetKind
from tests.support.store.checkpoints import CONFIG, WEIGHTS, refusal
from tests.support.store.format_2 import values_of
from tests.support.store.peft_models import deltas_of

HIDDEN, INNER, EXPERTS, RANK = 16, 24, 4, 2
MODULE = "backbone.layers.0.mixer.experts"
UP, DOWN = f"{MODULE}.up_proj", f"{MODULE}.down_proj"
PREFIX = f"base_model.model.{MODULE}"


class Mixture(torch.nn.Module):
    """The parameters of a layer, [experts, out, in], in the order of transformers' module."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up_proj = torch.nn.Parameter(torch.zeros(EXPERTS, inner, HIDDEN))
        self.down_proj = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, inner))


def model_of(inner: int) -> torch.nn.Module:
    """Returns a model with the mixture at its path."""
    model: torch.nn.Module = Mixture(inner)
    for name in reversed(MODULE.split(".")):
        parent = torch.nn.Module()
        parent.add_module(name, model)
        model = parent
    return model


def layout(inner: int = INNER) -> Layout:
    sizes = {UP: (HIDDEN, inner), DOWN: (inner, HIDDEN)}
    targets = (
        Target(name, 0, name, TargetKind.EXPERTS, *size, EXPERTS) for name, size in sizes.items()
    )
    made = Layout("org/tiny", "0" * 64, DataType.FLOAT32, 2, tuple(targets))
    validate(made)
    return made


def save(folder: Path, inner: int = INNER) -> dict[str, torch.Tensor]:
    """Saves an adapter with PEFT; returns what it adds, [experts, out, in] by the target."""
    torch.manual_seed(3)
    names = [f"experts.{name.rpartition('.')[2]}" for name in (DOWN, UP)]
    options = {"r": RANK, "lora_alpha": 6, "target_modules": [], "target_parameters": names}
    with warnings.catch_warnings(action="ignore"):
        adapted = peft.get_peft_model(model_of(inner), peft.LoraConfig(**options))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        adapted.save_pretrained(str(folder))
    outside = adapted.get_submodule(PREFIX)
    wrappers = (outside, outside.base_layer)
    return {
        f"{MODULE}.{each.parameter_name}": each.get_delta_weight("default").detach()
        for each in wrappers
    }


def rewritten(whole: Path, folder: Path, *, is_stack: bool) -> Path:
    """Writes it as stacks, or one by one."""
    shutil.copytree(whole, folder)
    saved, made = load_file(whole / WEIGHTS), {}
    for name, place in (("up_proj", f"{PREFIX}.base_layer"), ("down_proj", PREFIX)):
        a, b = (saved[f"{place}.lora_{side}.weight"] for side in "AB")
        sides = {
            "A": a.view(EXPERTS, RANK, -1),
            "B": b.view(len(b), RANK, EXPERTS).permute(2, 0, 1).contiguous(),
        }
        for side, stack in sides.items():
            if is_stack:
                made[f"{PREFIX}.{name}.lora_{side}.weight"] = stack.clone()
                continue
            for expert, each in enumerate(stack):
                made[f"{PREFIX}.{expert}.{name}.lora_{side}.weight"] = each.clone()
    save_file(made, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    config |= {"target_parameters": None, "target_modules": ["up_proj", "down_proj"]}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def image_of(folder: Path, inner: int = INNER) -> Image:
    return compile_image(open_checkpoint(folder), layout(inner))


def added(image: Image, inner: int = INNER) -> dict[str, torch.Tensor]:
    values = values_of(image, layout(inner))
    return {
        UP: torch.stack(deltas_of(values, UP, HIDDEN, inner)),
        DOWN: torch.stack(deltas_of(values, DOWN, inner, HIDDEN)),
    }


def test_every_form_is_the_same_image(tmp_path: Path) -> None:
    expected = save(tmp_path / "parameters")
    image = image_of(tmp_path / "parameters")
    for name, found in added(image).items():
        torch.testing.assert_close(found, expected[name])
    for is_stack in (True, False):
        other = image_of(
            rewritten(tmp_path / "parameters", tmp_path / str(is_stack), is_stack=is_stack)
        )
        assert other.buffer.equal(image.buffer)
        assert other.plan.segments == image.plan.segments


@pytest.mark.parametrize("version", ["0.18.1", "0.21.2", None])
def test_square_ones_are_those_of_their_pefts_version(tmp_path: Path, version: str | None) -> None:
    """Up and down have the same sizes, and do not tell each other's order."""
    expected = save(tmp_path, HIDDEN)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"peft_version": version}))
    if version is None:
        error = refusal(tmp_path)
        assert (error.reason, error.subject) == ("CONFIG_UNSUPPORTED", f"{PREFIX}.lora_A.weight")
        return
    for name, found in added(image_of(tmp_path, HIDDEN), HIDDEN).items():
        wanted = expected[name] if version == "0.21.2" else expected[name].mT
        torch.testing.assert_close(found, wanted)
