"""What trainers save along of the base is hashed as the checkpoint has it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.images.dtypes import DataType
from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint import base_hashes
from inference_svc.model.checkpoint.base_hashes import hashing_base
from inference_svc.model.checkpoint.files import weight_files
from inference_svc.model.checkpoint.headers import StoredTensor, stored_tensors

VOCAB = 600
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {"tie_word_embeddings": False},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": False},
}


def hashes_of(folder: Path, num_threads: int = 3) -> dict[str, tuple[DataType, tuple[bytes, ...]]]:
    with hashing_base(folder, load_description(folder), num_threads) as wait:
        return {name: (each.dtype, each.sha256) for name, each in wait().items()}


def expected_of(tensor: torch.Tensor) -> tuple[DataType, tuple[bytes, ...]]:
    """The definition: of each 256 rows, and of a vector of all of it."""
    blocks = tensor.split(256) if tensor.dim() > 1 else (tensor,)
    digests = [hashlib.sha256(each.view(torch.uint8).numpy().tobytes()) for each in blocks]
    dtype = {torch.float32: DataType.FLOAT32, torch.bfloat16: DataType.BFLOAT16}[tensor.dtype]
    return dtype, tuple(each.digest() for each in digests)


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for path in weight_files(folder) for name, tensor in load_file(path).items()
    }


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, random_model: Callable[..., Any]) -> Any:
    return random_model(request.param, vocab_size=VOCAB, **FAMILIES[request.param])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "60KB"}], ids=["one file", "shards"])
def test_each_weight_that_is_no_matrix_of_a_layer_is_hashed(model, save_model, dtype, shards):
    folder = save_model(model.to(dtype), **shards)
    assert len(weight_files(folder)) > len(shards)
    saved = saved_tensors(folder)
    expected = {
        name.removesuffix(".weight"): expected_of(tensor)
        for name, tensor in saved.items()
        if tensor.dim() == 1 or "layers" not in name
    }
    expected.setdefault("lm_head", expected["model.embed_tokens"])
    assert hashes_of(folder) == expected


def rewritten(folder: Path, **tensors: torch.Tensor) -> Path:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)
    return folder


def test_a_tied_head_is_the_embedding_unless_the_file_has_another(random_model, save_model):
    folder = save_model(random_model("Llama", tie_word_embeddings=True))
    before = hashes_of(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewritten(folder, **{"lm_head.weight": embedding.clone()})
    assert hashes_of(folder) == before
    rewritten(folder, **{"lm_head.weight": torch.randn(89, 48)})
    after = hashes_of(folder)
    assert after["lm_head"] != before["lm_head"]
    assert after | {"lm_head": before["lm_head"]} == before
    assert before["lm_head"] == before["model.embed_tokens"]


def test_what_no_hash_can_be_announced_of_is_left_out(random_model, save_model):
    folder = save_model(random_model("Llama"))
    before = hashes_of(folder)
    rewritten(folder, **{"model.norm.weight": torch.ones(48, dtype=torch.float64)})
    assert hashes_of(folder).keys() == before.keys() - {"model.norm"}


def test_a_file_that_is_cut_off(random_model, save_model):
    folder = save_model(random_model("Llama"))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for length in (len(data) - 1, 100):
        path.write_bytes(data[:length])
        with pytest.raises(UnsupportedModel, match="cannot be read"):
            hashes_of(folder)


def test_a_file_that_becomes_shorter(random_model, save_model, monkeypatch: pytest.MonkeyPatch):
    folder = save_model(random_model("Llama"))
    path = folder / "model.safetensors"

    def found_and_cut_off(model_dir: Path) -> list[tuple[str, StoredTensor]]:
        found = list(stored_tensors(model_dir))
        path.write_bytes(path.read_bytes()[:-1])
        return found

    monkeypatch.setattr(base_hashes, "stored_tensors", found_and_cut_off)
    with pytest.raises(OSError, match="has become shorter"):
        hashes_of(folder)
