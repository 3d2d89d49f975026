"""Whatever does not fit a family is refused by name, before anything large is allocated."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint import weights
from inference_svc.model.layers import TorchProjections
from tests.support.models.families import MODELS
from tests.support.models.whole_models import WHOLE, make_whole

FIRST = dict(reversed(MODELS.values()))
"""A model of each family."""


@pytest.fixture(scope="module", params=[*FIRST, *(f"whole {name}" for name in WHOLE)])
def saved(request: Any, random_model: Callable, tmp_path_factory: Any) -> Path:
    name = request.param.removeprefix("whole ")
    made: Path = tmp_path_factory.mktemp("model")
    if name != request.param:
        make_whole(name, made)
    else:
        random_model(name, **FIRST[name]).save_pretrained(made)
    return made


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return shutil.copytree(saved, tmp_path / "model")


def refused(folder: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*args: Any) -> None:
        raise AssertionError("it is refused too late")

    monkeypatch.setattr(weights._Assembly, "_empty", allocated)
    with pytest.raises(UnsupportedModel, match=message):
        weights.load_weights(
            folder, load_description(folder), torch.float32, "cpu", TorchProjections()
        )


def test_unknown_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"surprise": 0.5}))
    refused(folder, r"config\.json: surprise = 0\.5: not known for \w+", monkeypatch)


def shapes_of(path: Path) -> dict[str, list[int]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def save_zeros(shapes: dict[str, list[int]], path: Path) -> None:
    """Saves tensors in fp32, without making them."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


@pytest.mark.parametrize("fault", ["shape", "missing", "unexpected"])
def test_tensors(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of every kind that the family has, in any layer."""
    saved, wrapper = shapes_of(folder / "model.safetensors"), load_description(folder).wrapper
    text = {name: wrapper.text_name(name) for name in saved}
    kinds = {re.sub(r"\d+", "*", known): name for name, known in text.items() if known}
    assert len(kinds) >= 9
    for name in kinds.values():
        changed = dict(saved)
        if fault == "shape":
            changed[name] = [2 * saved[name][0], *saved[name][1:]]
            message = rf"{text[name]} has shape \[.*\], but \[.*\] by config\.json"
        elif fault == "missing":
            del changed[name]
            message = rf"missing tensors: {text[name]}"
        else:
            changed[f"{name}_scale"] = [1]
            message = rf"unexpected tensors: {text[name]}_scale"
        save_zeros(changed, folder / "model.safetensors")
        refused(folder, message, monkeypatch)
