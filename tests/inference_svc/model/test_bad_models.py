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

pytestmark = pytest.mark.matrix

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


@pytest.fixture
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*args: Any) -> None:
        raise AssertionError("it is refused too late")

    monkeypatch.setattr(weights._Assembly, "_empty", allocated)


def test_unknown_keys(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"surprise": 0.5}))
    message = r"config\.json: surprise = 0\.5: not known for \w+"
    with pytest.raises(UnsupportedModel, match=message):
        load_description(folder)


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


@pytest.mark.usefixtures("nothing_is_allocated")
def test_tensors(folder: Path) -> None:
    """One of every kind that the family has, in any layer: of another shape, missing, or one more
    beside it."""
    saved, description = shapes_of(folder / "model.safetensors"), load_description(folder)
    text = {name: description.wrapper.text_name(name) for name in saved}
    kinds = {re.sub(r"\d+", "*", known): name for name, known in text.items() if known}
    assert len(kinds) >= 9
    for name in kinds.values():
        shape, known = saved[name], text[name]
        others = {key: each for key, each in saved.items() if key != name}
        for changed, message in (
            (
                {**saved, name: [2 * shape[0], *shape[1:]]},
                rf"{known} has shape \[.*\], but config\.json says \[.*\]",
            ),
            (others, rf"missing tensors: {known}"),
            ({**saved, f"{name}_scale": [1]}, rf"unexpected tensors: {known}_scale"),
        ):
            save_zeros(changed, folder / "model.safetensors")
            with pytest.raises(UnsupportedModel, match=message):
                weights.load_weights(folder, description, torch.float32, "cpu", TorchProjections())
