"""Weights are read into their buffers from any shards; bad files are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.weights import ModelWeights, load_weights
from inference_svc.model.gguf.expand import expanded
from inference_svc.model.layers import TorchProjections
from tests.support.inference.gguf_files import write_gguf


@pytest.fixture
def model_dir(random_model, save_model):
    return save_model(random_model("Qwen3", head_dim=8, attention_bias=True))


def load(model_dir, dtype=torch.float32) -> ModelWeights[Any]:
    return load_weights(model_dir, load_description(model_dir), dtype, "cpu", TorchProjections())


def tensors(weights: ModelWeights[Any]) -> list[torch.Tensor]:
    assert "model.layers.0.self_attn.q_norm" in weights.norms
    norms = sorted(weights.norms.items())
    found = [*weights.tables.values(), *(norm.weight for _, norm in norms)]
    for _, linear in sorted(weights.projections.items()):
        found += [each for each in (linear.weight, linear.bias) if each is not None]
    return found


def test_fused_buffers(model_dir):
    weights, saved = load(model_dir), load_file(model_dir / "model.safetensors")
    prefix = "model.layers.1."
    qkv, gate_up, down = (
        weights.projections[f"layers.1.{name}"] for name in ("qkv", "gate_up", "down")
    )
    names = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
    assert torch.equal(qkv.weight, torch.cat([saved[name + ".weight"] for name in names]))
    assert qkv.bias is not None
    assert torch.equal(qkv.bias, torch.cat([saved[name + ".bias"] for name in names]))
    names = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert torch.equal(gate_up.weight, torch.cat([saved[name] for name in names]))
    assert gate_up.bias is None
    assert torch.equal(down.weight, saved[prefix + "mlp.down_proj.weight"])
    assert weights.num_bytes == sum(t.nbytes for t in tensors(weights))
    assert weights.num_bytes == sum(t.nbytes for t in saved.values())


def test_sharded_equals_single(random_model, save_model):
    model = random_model("Qwen3", head_dim=8, attention_bias=True)
    single, sharded = save_model(model), save_model(model, max_shard_size="40KB")
    assert not (sharded / "model.safetensors").exists()
    assert len(list(sharded.glob("*.safetensors"))) > 3
    for one, other in zip(tensors(load(single)), tensors(load(sharded)), strict=True):
        assert torch.equal(one, other)


def test_each_tensor_is_read_once_in_file_order(model_dir, monkeypatch):
    read: list[str] = []

    @contextmanager
    def recording(path, framework):
        with safe_open(path, framework=framework) as file:
            recorder = Mock(wraps=file)
            yield recorder
            read.extend(name for call in recorder.get_tensor.call_args_list for name in call.args)

    monkeypatch.setattr("safetensors.safe_open", recording)
    load(model_dir)
    with safe_open(model_dir / "model.safetensors", framework="pt") as file:
        assert read == file.offset_keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cast(dtype, model_dir):
    weights, saved = load(model_dir, dtype), load_file(model_dir / "model.safetensors")
    assert {tensor.dtype for tensor in tensors(weights)} == {dtype}
    assert torch.equal(weights.embedding, saved["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(weights.norms["model.norm"].weight, saved["model.norm.weight"].to(dtype))


def test_tied_head_shares_memory(random_model, save_model):
    """An old file may hold the head nevertheless, and the rotary frequencies."""
    folder = save_model(random_model("Llama", tie_word_embeddings=True))
    path = folder / "model.safetensors"
    saved = load_file(path)
    assert "lm_head.weight" not in saved
    saved["lm_head.weight"] = saved["model.embed_tokens.weight"].clone()
    saved["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(saved, path)
    weights = load(folder)
    assert weights.projections["head"].weight is weights.embedding
    assert torch.equal(weights.embedding, saved["model.embed_tokens.weight"])


NORM = "model.layers.2.input_layernorm.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def change(saved: dict[str, torch.Tensor], fault: str) -> None:
    if fault == "missing":
        del saved[NORM], saved[UP]
    elif fault == "unexpected":
        saved["model.layers.3.input_layernorm.weight"] = saved[NORM].clone()
    elif fault == "shape":
        saved[UP] = saved[UP][:-1].clone()
    elif fault == "transposed":
        saved[UP] = saved[UP].T.contiguous()
    elif fault == "dtype":
        saved[UP] = saved[UP].to(torch.int8)
    elif fault == "head":
        del saved["lm_head.weight"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", rf"/\S+: missing tensors: {UP}, {NORM}; is config\.json of another model"),
        ("unexpected", r"unexpected tensors: model\.layers\.3\.input_layernorm\.weight"),
        ("shape", rf"{UP} has shape \[79, 48\], but config.json says \[80, 48\]"),
        ("transposed", rf"{UP} has shape \[48, 80\]"),
        (
            "dtype",
            rf"{UP} has dtype I8; supported are F64, F32, F16, BF16: config.json has no quant",
        ),
        ("head", "missing tensors: lm_head.weight"),
    ],
)
def test_faulty_tensors(fault, message, model_dir):
    saved = load_file(model_dir / "model.safetensors")
    change(saved, fault)
    save_file(saved, model_dir / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        load(model_dir)


def test_missing_layers_are_counted(model_dir):
    description = load_description(model_dir)
    description = replace(description, blocks=description.blocks * 3)
    with pytest.raises(UnsupportedModel, match=r"missing tensors: .* and \d+ more"):
        load_weights(model_dir, description, torch.float32, "cpu", TorchProjections())


def test_no_files(model_dir):
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors cannot be read: No such file"):
        load(model_dir)


def test_truncated_file(model_dir):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors cannot be read"):
        load(model_dir)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ('{"weight_map": ["a"]}', "cannot be read"),
        ('{"weight_map": {"a": ["b.safetensors"]}}', "cannot be read"),
        ("[" * 200_000, "cannot be read"),
        ('{"weight_map": {}}', "names no file: copy it from the model's source"),
        *(
            (
                json.dumps({"weight_map": {"a": name}}),
                "names a file that is not a safetensors file in its folder: ",
            )
            for name in (1, "", "..", "../b.safetensors", "b.bin", "*", "*.safetensors")
        ),
        *(
            (
                json.dumps({"weight_map": {"a": name}}),
                "names a file that is not a safetensors file in its folder: ",
            )
            for name in ("b?.safetensors", "[b].safetensors", "a\nb.safetensors")
        ),
        (json.dumps({"weight_map": {"a": "b.safetensors"}}), r"b\.safetensors cannot be read"),
    ],
)
def test_faulty_index(index, message, model_dir):
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UnsupportedModel, match=message):
        load(model_dir)


MEASURE = """
import re, sys, torch
from pathlib import Path
from typing import Any
from inference_svc.model.architectures import load_description
from inference_svc.model.layers import TorchProjections
from inference_svc.model.checkpoint import weights as weights_module
from inference_svc.model.checkpoint.weights import load_weights
weights_module.BLOCK_ELEMENTS = 1 << 20
def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

folder = Path(sys.argv[1])
description = load_description(folder)
torch.zeros(8).bfloat16().float()  # whatever torch loads at first use
for name in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = peak()
    weights = load_weights(folder, description, getattr(torch, name), "cpu", TorchProjections())
    print(peak() - before, weights.num_bytes)
    del weights
"""


@pytest.mark.parametrize("size", [1, 100])
def test_rows_are_read_in_blocks(size, model_dir, monkeypatch):
    """Of tables, projections and biases."""
    whole = tensors(load(model_dir))
    monkeypatch.setattr("inference_svc.model.checkpoint.weights.BLOCK_ELEMENTS", size)
    for one, other in zip(whole, tensors(load(model_dir)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.processes
def test_no_second_copy_in_memory(random_model, save_model):
    """The peak of a process of its own, mapped pages of the file included."""
    folder = save_model(
        random_model(
            "Llama", vocab_size=4000, hidden_size=576, intermediate_size=2048, num_hidden_layers=6
        )
    )
    largest = 4000 * 576 * 4
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), "bfloat16", "float32"],
        capture_output=True,
        text=True,
        check=True,
    )
    for size, line in zip((0.5, 1), done.stdout.splitlines(), strict=True):
        grown, num_bytes = map(int, line.split())
        assert num_bytes > 5 * largest * size
        assert num_bytes * 0.9 < grown < num_bytes + 1.5 * largest


@pytest.mark.processes
def test_blocks_of_a_gguf_file_are_dequantised_little_by_little(random_model, tmp_path):
    """The table would take 82 MB in fp32."""
    model = random_model(
        "Llama",
        vocab_size=80_000,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    write_gguf(tmp_path / "model.gguf", "llama", model, {"embed_tokens": "Q6_K"}, {})
    with expanded(tmp_path, has_tokenizer=False) as folder:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder), "bfloat16"],
            capture_output=True,
            text=True,
            check=True,
        )
    grown, num_bytes = map(int, done.stdout.split())
    assert num_bytes > 2 * 80_000 * 256
    assert num_bytes * 0.9 < grown < num_bytes + 40_000_000
