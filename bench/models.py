"""The benchmarks' models and adapters: real shapes, random weights, made once in `.bench`."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from bench.gpu_run.model import read_description
from inference_svc.adapters.targets import build_layout
from inference_svc.model.description import Decoder, Projection
from inference_svc.model.walk import layer_projections

NAME = "bench-200m"
REAL = "smollm2"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's class in transformers, and the values of its config."""

    architecture: str
    values: dict[str, Any]

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.architecture)

    def make_config(self) -> Any:
        """Returns the config of a model in bf16."""
        return self.model_class.config_class(
            **{"max_position_embeddings": 2048, "tie_word_embeddings": False} | self.values,
            architectures=[self.architecture],
            dtype=torch.bfloat16,
        )


_SIZE_200M = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
}
SHAPES = {
    NAME: Shape(
        "LlamaForCausalLM", _SIZE_200M | {"num_attention_heads": 16, "num_key_value_heads": 4}
    ),
    # Heads, windows and rotations of Gemma 3 1B.
    "bench-gemma3": Shape(
        "Gemma3ForCausalLM",
        _SIZE_200M
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
    ),
    # Heads and rotation of Phi-4.
    "bench-phi4": Shape(
        "Phi3ForCausalLM",
        _SIZE_200M
        | {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    # A third of Qwen3.5-0.8B's layers: six gated delta nets and two of attention.
    "bench-qwen3_5": Shape(
        "Qwen3_5ForCausalLM",
        {
            "vocab_size": 8192,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
        },
    ),
    # The shape of TinyLlama.
    "bench-1b": Shape(
        "LlamaForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
    ),
    # Half of OLMoE-1B-7B's width and of its layers, with as many experts.
    "bench-moe": Shape(
        "OlmoeForCausalLM",
        {
            "vocab_size": 8192,
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    # Small experts, so that an adapter is large compared with the model.
    "bench-moe-large": Shape(
        "OlmoeForCausalLM",
        {
            "vocab_size": 8192,
            "hidden_size": 1024,
            "intermediate_size": 128,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    # SmolLM2-135M-Instruct: real weights and adapters, by `bench.workloads.real_model`.
    REAL: Shape(
        "LlamaForCausalLM",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "tie_word_embeddings": True,
        },
    ),
    "bench-tiny": Shape(
        "LlamaForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}
"""bench-200m has 197 M parameters, bench-qwen3_5 182 M, bench-1b 1.1 G, and bench-moe 0.85 G, an
eighth of them for each token; bench-tiny is for trials. The products of bench-gemma3 and bench-phi4
have the sizes of bench-200m's."""
RANK = 16
ROOT = Path(".bench/models")


@cache
def decoder(name: str) -> Decoder:
    """Returns the inference service's description of the model."""
    return read_description(SHAPES[name].make_config().to_diff_dict())


def projections(name: str) -> list[tuple[str, int, int]]:
    """Returns the name, and the (in, out) features, of each of the adapters' targets in all layers:
    the checkpoint's linear layers, without routers and experts."""
    return [
        (member.module.rpartition(".")[2], spec.in_features, member.out_features)
        for spec in layer_projections(decoder(name))
        if isinstance(spec, Projection) and spec.name != "router"
        for member in spec.stored
    ]


def image_bytes(name: str, rank: int = RANK) -> int:
    """Returns the size of one adapter's bf16 image, whose segments need no padding at ranks that
    are multiples of 4. A module that computes several targets has one A."""
    return 2 * rank * sum(into + out for _, into, out in projections(name))


def arena_bytes(name: str, num_adapters: int, rank: int = RANK) -> int:
    """Returns an arena's size for `num_adapters` adapters, or for one that changes all weights."""
    layout = build_layout(decoder(name), name, torch.bfloat16)
    return max(image_bytes(name, rank) * num_adapters, layout.largest_image(rank).num_bytes)


def kv_bytes(name: str, num_tokens: int) -> int:
    """Returns the size of the keys and values of `num_tokens` tokens."""
    return 2 * num_tokens * decoder(name).kv_elements_per_token


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model on disk, and its adapters by name: "0", "1", and so on."""

    name: str
    model_dir: Path
    adapters: dict[str, Path]

    @property
    def vocab(self) -> int:
        return decoder(self.name).vocab_size


def prepare(name: str, num_adapters: int, root: Path = ROOT, rank: int = RANK) -> Prepared:
    """Makes a model and its adapters, if they are missing. The real model's have ranks of their
    own."""
    if name == REAL:
        from bench.workloads.real_model import prepare_real  # which needs this module

        return prepare_real(num_adapters)
    root = (root / name).resolve()
    model_dir = root / "model"
    if not model_dir.is_dir():
        shutil.rmtree(root, ignore_errors=True)
        partial = root / "model.partial"
        make_model(partial, name)
        partial.rename(model_dir)
    stem = "adapter" if rank == RANK else f"adapter-rank-{rank}"
    adapters = {str(index): root / f"{stem}-{index}" for index in range(num_adapters)}
    prepared = Prepared(name, model_dir, adapters)
    for number, folder in adapters.items():
        prepare_adapter(prepared, folder, int(number), rank=rank)
    return prepared


def prepare_adapter(prepared: Prepared, folder: Path, seed: int, **options: Any) -> None:
    """Calls `make_adapter` if the adapter is missing."""
    if folder.is_dir():
        return
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with warnings.catch_warnings(action="ignore"):  # PEFT warns of biases
        make_adapter(prepared.model_dir, partial, seed, name=prepared.name, **options)
    partial.rename(folder)


def make_model(folder: Path, name: str = NAME) -> None:
    """Makes a model in bf16, with a tokenizer whose tokens are numbers."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    config = shape.make_config()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        shape.model_class(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    vocab = {f"{token} ": token for token in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="0 "))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def make_adapter(
    model_dir: Path,
    folder: Path,
    seed: int,
    rank: int = RANK,
    name: str = NAME,
    num_added: int = 0,
    targets: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Makes a PEFT adapter over all linear layers of the decoder, or over `targets`, with alpha
    2 * rank, bf16 files, and `num_added` tokens after the vocabulary. Other options go to its
    config, and may replace alpha."""
    torch.manual_seed(seed)
    options = {"lora_alpha": 2 * rank} | options
    config = LoraConfig(
        r=rank,
        target_modules=sorted({each for each, *_ in projections(name)})
        if targets is None
        else list(targets),
        base_model_name_or_path=name,
        **options,
    )
    model_class = SHAPES[name].model_class
    model_config = model_class.config_class.from_pretrained(model_dir)
    model_config.vocab_size += num_added
    with torch.device("meta"):
        model = model_class(model_config)
        inject_adapter_in_model(config, model)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {
        f"base_model.model.{name}": (torch.randn(value.shape) * 0.02).to(torch.bfloat16)
        for name, value in state.items()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config.inference_mode = True
    config.save_pretrained(folder)


def make_variants(original: Path, root: Path) -> Iterator[Path]:
    """Yields folders with different digests, which differ in the lowest bits of some values."""
    data = bytearray((original / "adapter_model.safetensors").read_bytes())
    last = bytes(data[-64:])
    number = 0
    while True:
        for bit in range(16):
            data[4 * bit - 64] = last[4 * bit] ^ (number + 1) >> bit & 1
        folder = root / f"variant-{number}"
        folder.mkdir(parents=True)
        shutil.copy(original / "adapter_config.json", folder)
        (folder / "adapter_model.safetensors").write_bytes(data)
        yield folder
        number += 1


def prompts(count: int, length: int, vocab: int = 8192, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count, length), generator=generator).tolist()
