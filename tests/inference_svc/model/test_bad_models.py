"""Whatever does not fit a family is refused by name, before anything large is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_svc.errors import UnsupportedModel
from inference_svc.model import weights
from inference_svc.model.architectures import load_description
from inference_svc.model.layers import Linear
from tests.inference_svc.model.test_parity import MODELS

FIRST = dict(reversed(MODELS.values()))
"""A model of each family."""
KINDS = ("embed_tokens", "norm", "proj")


@pytest.fixture(params=FIRST)
def folder(request: Any, random_model: Callable, save_model: Callable) -> Path:
    return save_model(random_model(request.param, **FIRST[request.param]))


def refused(folder: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*args: Any) -> None:
        raise AssertionError("it is refused too late")

    monkeypatch.setattr(weights._Buffers, "allocate", allocated)
    with pytest.raises(UnsupportedModel, match=message):
        weights.load_weights(folder, load_description(folder), torch.float32, "cpu", Linear)


def test_unknown_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"surprise": 0.5}))
    refused(folder, r"config\.json: surprise = 0\.5: not known for \w+", monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["shape", "missing", "unexpected"])
def test_tensors(kind: str, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = load_file(folder / "model.safetensors")
    name = next(each for each in saved if kind in each)
    if fault == "shape":
        saved[name] = saved[name][:-1].clone()
        message = rf"{name} has shape \[.*\], config\.json says \["
    elif fault == "missing":
        del saved[name]
        message = rf"missing tensors: {name}"
    else:
        saved[f"{name}_scale"] = torch.ones(1)
        message = rf"unexpected tensors: {name}_scale"
    save_file(saved, folder / "model.safetensors")
    refused(folder, message, monkeypatch)
