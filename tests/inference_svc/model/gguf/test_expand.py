"""A GGUF file becomes a model's folder, or is refused by key and value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference_svc.config import InferenceSettings
from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.base_hashes import hashing_base
from inference_svc.model.checkpoint.files import check_files, weight_files
from inference_svc.model.gguf.config import config_of, generation_config_of
from inference_svc.model.gguf.expand import expanded
from inference_svc.model.gguf.file import TYPES, Header, StoredTensor, read_header
from inference_svc.model.gguf.tensors import GgufRows, read, tensors
from servicekit.errors import InvalidSetting
from servicekit.settings.load import load_settings
from tests.support.inference.gguf_files import SIZES, apart, llama3_factors, write_gguf

pytestmark = pytest.mark.matrix

Random = Callable[..., PreTrainedModel]
KINDS = {"embed_tokens": "Q8_0", "proj": "Q4_K"}


@pytest.fixture
def write(random_model: Random, tmp_path: Path) -> Callable[..., Path]:
    """`write(name, metadata)`: a small Llama as a file in a folder of its own."""

    def make(metadata: Mapping[str, Any] | None = None, **changes: Any) -> Path:
        folder = tmp_path / "Tiny-1B"
        folder.mkdir(exist_ok=True)
        model = random_model("Llama", **(SIZES | {"tie_word_embeddings": True} | changes))
        path = folder / "tiny.gguf"
        write_gguf(path, "llama", model, KINDS, metadata or {})
        return path

    return make


def test_a_folder_with_one_file(write: Callable[..., Path]) -> None:
    path = write({"tokenizer.ggml.eos_token_id": 2, "general.sampling.temp": 0.6})
    before = sorted(path.parent.iterdir())
    for model in (path, path.parent):
        with expanded(model) as folder:
            check_files(folder, has_tokenizer=False)
            assert weight_files(folder) == [folder / path.name]
            assert (folder / path.name).samefile(path)
            decoder = load_description(folder)
            generation = json.loads((folder / "generation_config.json").read_text())
        assert not folder.exists()
        assert decoder.eos_token_ids == (2,)
        assert generation == {"eos_token_id": [2], "temperature": 0.6}
        assert decoder.quantisation is not None
        assert decoder.quantisation.name == "gguf, Q4_K and Q8_0"
    assert sorted(path.parent.iterdir()) == before


def test_other_folders_stay_themselves(write: Callable[..., Path]) -> None:
    folder = write().parent
    (folder / "config.json").write_text("{}")
    with expanded(folder) as found:
        assert found == folder


def test_of_several_files_one_is_named(write: Callable[..., Path]) -> None:
    path = write()
    (path.parent / "other.gguf").write_bytes(path.read_bytes())
    named = r"Tiny-1B has 2 GGUF files: name the file to serve, such as .*other\.gguf"
    with pytest.raises(UnsupportedModel, match=named), expanded(path.parent):
        pass
    with expanded(path) as folder:
        assert weight_files(folder) == [folder / path.name]


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("tiny.gguf", "tiny"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("qwen2.5-7b-q4_k_m.gguf", "qwen2.5-7b"),
        ("Tiny-1B-BF16.gguf", "Tiny-1B"),
        ("Tiny-UD-Q4_K_XL.gguf", "Tiny"),
        ("Q4_0.gguf", "Q4_0"),
    ],
)
def test_settings(file: str, named: str, write: Callable[..., Path]) -> None:
    """A model is named by its folder, or its file without the type of its weights."""
    path = write()
    path = path.rename(path.with_name(file))
    for model, name in ((path, named), (path.parent, "Tiny-1B")):
        settings = load_settings(InferenceSettings, ["--model", str(model)])
        assert settings.base_model_names == (name,)
    path.unlink()
    with pytest.raises(InvalidSetting, match=r"no config\.json and no \.gguf file"):
        load_settings(InferenceSettings, ["--model", str(path.parent)])
    with pytest.raises(InvalidSetting, match=rf"there is no file .*{re.escape(file)}"):
        load_settings(InferenceSettings, ["--model", str(path)])


def test_rows_of_a_table_are_read_alone(write: Callable[..., Path]) -> None:
    path = write(vocab_size=2000)
    every = read(path, "model.embed_tokens.weight")
    assert (every.dtype, every.shape) == (torch.float32, (2000, 256))
    rows = GgufRows(path, "model.embed_tokens.weight")
    assert torch.equal(rows[1500:1700], every[1500:1700])
    assert torch.equal(rows[1500:10_000], every[1500:])
    assert rows[7:7].shape == (0, 256)
    assert torch.equal(rows[7], every[7])


def test_blocks_of_heads_are_apart(write: Callable[..., Path]) -> None:
    path = write()
    name = "model.layers.1.self_attn.k_proj.weight"
    [stored] = [each.stored for each in tensors(path) if each.name == name]
    raw = np.fromfile(path, np.uint8, stored.num_bytes, offset=stored.start)
    expected = apart(torch.from_numpy(raw).view(stored.shape[0], -1), 2)
    assert torch.equal(read(path, name), expected)
    rows = GgufRows(path, name)
    for start, stop in ((3, 9), (60, 70), (64, 128), (5, 5)):
        assert torch.equal(rows[start:stop], expected[start:stop])


def test_hashes_are_of_weights_as_trainers_have_them(write: Callable[..., Path]) -> None:
    """Neither of blocks nor of changed rows."""
    path = write(attention_bias=True)
    with expanded(path) as folder:
        decoder = load_description(folder)
        with hashing_base(folder, decoder, 1) as wait:
            hashes = wait()
    assert "model.embed_tokens" not in hashes
    found = {name.rpartition("layers.0.")[2] for name in hashes if "layers.0." in name}
    assert {"input_layernorm", "self_attn.v_proj.bias"} <= found
    assert not found & {"self_attn.q_proj.bias", "self_attn.k_proj.bias"}


def test_end_tokens(write: Callable[..., Path]) -> None:
    """All that the metadata name, and control tokens that are known to end answers."""
    tokens = ["a", "<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>"]
    path = write(
        {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 3, 3, 3, 1, 3],
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 3,
        }
    )
    assert generation_config_of(read_header(path)) == {"eos_token_id": [2, 3, 5]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "mamba"}, r"architecture = 'mamba': supported in"),
    "type": ({"general.type": "adapter"}, "general.type = 'adapter': only a model"),
    "part": ({"split.count": 3}, r"split.count = 3: .* join the parts with llama-gguf-split"),
    "unknown": ({".attention.temperature": 2.0}, r"llama.attention.temperature = 2.0: not known"),
    "experts": ({".expert_count": 8}, "llama.expert_count = 8: not known, and it may change"),
    "heads": ({".attention.head_count": [4, 2]}, r"head_count = \[4, 2\]: layers of different"),
    "no-heads": ({".attention.head_count": 0}, "head_count = 0: must be a positive integer"),
    "truth": ({".attention.head_count": True}, "head_count = True: must be a positive integer"),
    "size": ({".embedding_length": "8"}, "embedding_length = '8': must be a positive integer"),
    "eps": ({".attention.layer_norm_rms_epsilon": float("nan")}, "epsilon = nan: must be a num"),
    "theta": ({".rope.freq_base": float("inf")}, "freq_base = inf: must be a number above 0"),
    "values": ({".attention.value_length": 32}, "value_length = 32: must be 64 here"),
    "part-of-heads": ({".rope.dimension_count": 32}, "dimension_count = 32: must be 64 here"),
    "scaling": ({".rope.scaling.type": "longrope"}, "scaling.type = 'longrope': supported are lin"),
    "factor": ({".rope.scaling.type": "linear"}, "rope.scaling.factor = None: must be a number"),
    "layers": ({".block_count": 3}, "block_count = 3: the tensors of the file are of another"),
    "vocabulary": ({".vocab_size": 97}, "vocab_size = 97: must be 96 here"),
    "tokens": (
        {"tokenizer.ggml.tokens": [str(number) for number in range(97)]},
        "tokens = .* 97 tokens, but the embedding has 96 rows",
    ),
    "eos": (
        {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.eos_token_id": 1},
        "eos_token_id = 1: no token of the vocabulary, which has 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_honoured(name: str, write: Callable[..., Path]) -> None:
    changes, message = REFUSED[name]
    header = read_header(write())
    changed = {f"llama{key}" if key[0] == "." else key: value for key, value in changes.items()}
    header = Header(header.path, {**header.metadata, **changed}, header.tensors)
    with pytest.raises(UnsupportedModel, match=message):
        config_of(header)


def test_tensors_that_are_not_known(write: Callable[..., Path]) -> None:
    header = read_header(write())
    for name in ("blk.0.attn_sinks.weight", "blk.00.attn_q.weight", "v.patch_embd.weight"):
        other = StoredTensor(name, (4,), TYPES[0], 0)
        changed = Header(header.path, header.metadata, (*header.tensors, other))
        with pytest.raises(UnsupportedModel, match=f"not known for .* = 'llama': '{name}'"):
            config_of(changed)


def test_blocks_are_of_matrices_only(write: Callable[..., Path]) -> None:
    header = read_header(write())
    norm = next(each for each in header.tensors if each.name == "output_norm.weight")
    others = tuple(each for each in header.tensors if each is not norm)
    changed = Header(header.path, header.metadata, (*others, norm._replace(type=TYPES[8])))
    with pytest.raises(UnsupportedModel, match="has Q8_0, which only matrices may"):
        config_of(changed)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_frequencies(factor: float, random_model: Random, tmp_path: Path) -> None:
    model = random_model("Llama", **SIZES)
    factors = llama3_factors(factor, 500_000.0, 64)
    path = tmp_path / "a.gguf"

    def config_with(values: np.ndarray) -> dict[str, Any]:
        metadata = {".rope.freq_base": 500_000.0}
        write_gguf(path, "llama", model, {}, metadata, {"rope_freqs.weight": values})
        return config_of(read_header(path))

    assert config_with(factors)["rope_scaling"]["factor"] == factor
    assert "rope_scaling" not in config_with(np.ones(32, np.float32))
    for broken in (factors[:-1], factors + 0.1, np.zeros(32, np.float32), factors * np.nan):
        with pytest.raises(UnsupportedModel, match=r"the tensor rope_freqs\.weight"):
            config_with(broken.astype(np.float32))


def test_a_claimed_head_size_costs_nothing_before_it_is_compared(
    random_model: Random, tmp_path: Path
) -> None:
    """Factors of 2^31 dimensions would fill the memory."""
    size = 1 << 31
    sizes = {".attention.key_length": size, ".attention.value_length": size}
    sizes[".rope.dimension_count"] = size
    path = tmp_path / "a.gguf"
    factors = {"rope_freqs.weight": llama3_factors(8.0, 500_000.0, 64)}
    write_gguf(path, "llama", random_model("Llama", **SIZES), {}, sizes, factors)
    with pytest.raises(UnsupportedModel, match=r"the tensor rope_freqs\.weight"):
        config_of(read_header(path))


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_the_largest_models_scale_scores_by_all_heads(architecture: str) -> None:
    """The published files of 27B have 46 and 62 layers, and do not say it."""
    layers, hidden_size = {"gemma2": (46, 4608), "gemma3": (62, 5376)}[architecture]
    sizes = {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": hidden_size,
        "feed_forward_length": 36864,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.sliding_window": 1024,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    metadata = {f"{architecture}.{key}": value for key, value in sizes.items()}
    metadata["general.architecture"] = architecture
    stored = [
        StoredTensor("token_embd.weight", (256, hidden_size), TYPES[1], 0),
        StoredTensor(f"blk.{layers - 1}.attn_q.weight", (4096, hidden_size), TYPES[1], 1 << 40),
    ]
    config = config_of(Header(Path("a.gguf"), metadata, tuple(stored)))
    assert config["query_pre_attn_scalar"] == {"gemma2": 144, "gemma3": 168}[architecture]


def test_a_file_replaced_while_it_is_served_is_read_anew(write: Callable[..., Path]) -> None:
    path = write()
    assert len(tensors(path)) == 20 + 1  # the head, too, is the embedding
    write(num_hidden_layers=3)
    assert len(tensors(path)) == 29 + 1
    path.unlink()
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        tensors(path)


def test_a_gguf_made_by_the_package_has_an_architecture(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight has no place in the file"):
        config_of(read_header(path))
