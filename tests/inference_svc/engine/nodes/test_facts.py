"""The facts that nodes compare name every difference that would change answers, and no other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

import contract
from inference_svc.backends.torch import TorchFactory
from inference_svc.core import EngineConfig, Nodes
from inference_svc.engine.ranks.nodes import facts
from inference_svc.engine.ranks.nodes.facts import computing_of, differences, facts_of

NODES = Nodes(2, 0, "127.0.0.1:1", 1.0, "a secret of all nodes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"vocab_size": 8, "_name_or_path": "here"}))
    tensors = {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(3)}
    save_file(tensors, made / "model.safetensors")
    return made


def found(config: EngineConfig) -> dict[str, str]:
    return facts_of(config) | computing_of(TorchFactory())


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(folder, "model", tensor_parallel=2, nodes=NODES)


def changed(folder: Path, name: str, change: Callable[[Path], None]) -> str:
    """Returns how a copy of a model differs after a change."""
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    change(copy)
    return differences(found(config_of(folder)), found(config_of(copy)))


def test_equal_nodes(folder: Path) -> None:
    """They may have the model in another folder, in other files, and other machines."""
    config = config_of(folder)

    def split(copy: Path) -> None:
        (copy / "config.json").write_text(json.dumps({"_name_or_path": "there", "vocab_size": 8}))
        tensors = load_file(copy / "model.safetensors")
        (copy / "model.safetensors").unlink()
        for number, (name, tensor) in enumerate(tensors.items(), start=1):
            save_file({name: tensor}, copy / f"model-0000{number}-of-00002.safetensors")
        files = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate(tensors, 1)}
        index = {"metadata": {}, "weight_map": files}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))

    assert changed(folder, "other", split) == ""
    other = replace(config, nodes=replace(NODES, index=1), num_threads=3, memory_limit_bytes=9)
    other = replace(other, prompt_image_bytes=1 << 20)
    assert differences(found(config), found(other)) == ""


def test_a_model_with_other_values(folder: Path) -> None:
    """Of equal shapes, as another version has."""

    def train(copy: Path) -> None:
        tensors = load_file(copy / "model.safetensors")
        save_file({**tensors, "a.weight": tensors["a.weight"] + 1}, copy / "model.safetensors")

    assert changed(folder, "trained", train).startswith("a digest of the model's tensors is ")


def test_a_model_with_another_config(folder: Path) -> None:
    def change(copy: Path) -> None:
        (copy / "config.json").write_text(json.dumps({"vocab_size": 8, "rope_theta": 1e6}))

    assert changed(folder, "changed", change).startswith("the model's config.json is ")


def test_settings_that_differ(folder: Path) -> None:
    config = config_of(folder)
    other = replace(config, kv_bytes=1 << 20, dtype="bfloat16")
    differs = "--dtype is bfloat16, and float32 on rank 0"
    differs += "; --kv-memory is 1048576, and 268435456 on rank 0"
    assert differences(found(config), found(other)) == differs


def test_another_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = found(config_of(folder))
    monkeypatch.setattr(facts, "version", lambda package: "9.9.9")
    other = found(config_of(folder))
    assert "the version of Loadout is 9.9.9, and" in differences(own, other)


@pytest.mark.parametrize("name", ["more.py", "folder/more.cpp"])
def test_other_code_of_the_same_version(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two builds of a source tree have."""
    own, package = found(config_of(folder)), ModuleType("contract")
    package.__path__ = [str(tmp_path / "contract")]
    shutil.copytree(contract.__path__[0], package.__path__[0])
    monkeypatch.setattr(facts, "_CODE", (package, *facts._CODE[1:]))
    assert differences(own, found(config_of(folder))) == "", "wherever it is installed"
    path = tmp_path / "contract" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    differs = differences(own, found(config_of(folder)))
    assert re.fullmatch("a digest of Loadout's code is [0-9a-f]{16}, and .* on rank 0", differs)


def test_facts_that_only_one_side_has() -> None:
    assert differences({"--new": "1"}, {"--old": "2"}) == (
        "--new is unknown, and 1 on rank 0; --old is 2, and unknown on rank 0"
    )


def test_the_exceptions_are_fields() -> None:
    names = {each.name for each in fields(EngineConfig)}
    assert names >= facts._OWN
    assert names >= facts._FLAGS.keys()
