"""Adapters in several files."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.open import open_checkpoint
from tests.support.store.checkpoints import WEIGHTS, refusal


def shard(folder: Path, weight_map: dict[str, str] | None = None) -> dict[str, str]:
    """Splits the single file in two with an index, as `save_pretrained` of large models does."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"adapter_model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    text = json.dumps({"metadata": {}, "weight_map": weight_map or index})
    (folder / f"{WEIGHTS}.index.json").write_text(text)
    return index


def test_sharded_is_the_same_adapter(make_adapter):
    folder = make_adapter()
    single = open_checkpoint(folder)
    shard(folder)
    sharded = open_checkpoint(folder)
    assert sharded.digest == single.digest
    name = "model.layers.1.self_attn.v_proj"
    for old, new in (
        (single.targets[name].a, sharded.targets[name].a),
        (single.targets[name].b, sharded.targets[name].b),
    ):
        assert (old.key, old.shape) == (new.key, new.shape)
    assert sharded.read_tensor(sharded.targets[name].b).shape == (8, 4)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_shard_that_would_stay_unused_is_refused(make_adapter, is_sharded):
    folder = make_adapter()
    stray = "adapter_model-00003-of-00003.safetensors"
    shutil.copy(folder / WEIGHTS, folder / stray)
    if is_sharded:
        shard(folder)
    error = refusal(folder)
    assert (error.reason, error.subject) == ("FILE_UNUSED", stray)


def test_index_must_agree_with_the_shards(make_adapter):
    folder = make_adapter()
    index = shard(folder)
    index_file = folder / f"{WEIGHTS}.index.json"
    first = min(index)
    for weight_map, reason in (
        ({**index, first: f"../{index[first]}"}, "INDEX_INVALID"),
        ({**index, first: "adapter_config.json"}, "INDEX_INVALID"),
        ({}, "INDEX_INVALID"),
        ({k: v for k, v in index.items() if k != first}, "INDEX_MISMATCH"),
        ({**index, "base_model.model.x": index[first]}, "INDEX_MISMATCH"),
        ({**index, first: "adapter_model-00009-of-00009.safetensors"}, "INDEX_MISMATCH"),
    ):
        index_file.write_text(json.dumps({"weight_map": weight_map}))
        assert refusal(folder).reason == reason
    for crowd in ({"weight_map": [[]] * 200_000}, {"weight_map": index, "x": [0] * 200_000}):
        index_file.write_text(json.dumps(crowd))
        assert "more than 65536 tensors" in refusal(folder).message
    (folder / WEIGHTS).touch()
    assert refusal(folder).reason == "FILES_AMBIGUOUS"
