"""Adapters that PEFT trains of tiny models, and their compiled segments."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.images.compile import compile_image
from contract.images.dtypes import DataType
from contract.images.layout_rules import validate
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import OtherName, Target, TargetKind
from tests.support.store.format_2 import experts_of, values_of

HIDDEN, INNER, KV, VOCAB = 16, 24, 8, 40
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
A, B = SegmentKind.A, SegmentKind.B

Values = Mapping[tuple[str, SegmentKind], torch.Tensor]


def layout(image_format: int = 2) -> Layout:
    """The targets of the model below, with its biases and norms where the format has them."""
    sizes = {Q: HIDDEN, K: KV, V: KV}
    targets = [Target(EMBEDDING, None, "embed", TargetKind.EMBEDDING, VOCAB, HIDDEN)]
    targets += [
        Target(name, 0, "qkv", TargetKind.LINEAR, HIDDEN, size) for name, size in sizes.items()
    ]
    targets.append(Target(HEAD, None, "head", TargetKind.LINEAR, HIDDEN, VOCAB))
    if image_format > 1:
        vectors = {f"{name}.bias": size for name, size in sizes.items()}
        vectors |= {"model.layers.0.input_layernorm": HIDDEN, "model.norm": HIDDEN}
        targets[-1:-1] = [
            Target(name, 0 if "layers" in name else None, name, TargetKind.VECTOR, 0, size)
            for name, size in vectors.items()
        ]
    made = Layout("org/base", "0" * 64, DataType.FLOAT32, image_format, tuple(targets))
    validate(made)
    return made


def tied(of: Layout) -> Layout:
    """Ties the head to the embedding."""
    targets = tuple(
        dataclasses.replace(target, tied_to=EMBEDDING) if target.name == HEAD else target
        for target in of.targets
    )
    made = dataclasses.replace(of, targets=targets)
    validate(made)
    return made


def make_model(*, tied: bool = False, **options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model


def adapt(folder: Path, model: Any = None, **options: Any) -> Any:
    """Returns the model with an adapter all of whose trained weights are random, saved to
    `folder`. Other options go to its config."""
    save = {"save_embedding_layers": options.pop("save_embedding_layers", "auto")}
    fields = {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings(action="ignore"):
        config = peft.LoraConfig(**{**fields, **options})
        adapted = peft.get_peft_model(model or make_model(), config).eval()
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.5)
        adapted.save_pretrained(str(folder), **save)
    return adapted


def compiled(folder: Path, of: Layout | None = None) -> tuple[Checkpoint, Values]:
    """Returns what is read, and the segments of its image; reads what was stored once more, as a
    blob that nobody has verified."""
    checkpoint = open_checkpoint(folder)
    again = open_checkpoint(folder, digest=checkpoint.digest)
    made, of = compile_image(checkpoint, of or layout()), of or layout()
    assert compile_image(again, of).buffer.equal(made.buffer)
    return checkpoint, values_of(made, of)


def module(adapted: Any, name: str) -> Any:
    return adapted.get_submodule(f"base_model.model.{name}")


EXPERTS = "model.layers.0.mlp.experts"
GATE, UP, DOWN = (f"{EXPERTS}.{name}" for name in ("w1", "w3", "w2"))
NUM_EXPERTS, WIDTH = 4, 12


def moe(kind: str, width: int = WIDTH) -> Any:
    """Parameters [experts, out, in] of Qwen3, and [experts, in, out], gate and up in turns, of
    GPT-OSS."""
    torch.manual_seed(4)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    if kind == "qwen3":
        sizes |= {"moe_intermediate_size": width, "num_experts": NUM_EXPERTS}
        config: Any = transformers.Qwen3MoeConfig(**sizes)
    else:
        sizes |= {"intermediate_size": width, "num_local_experts": NUM_EXPERTS}
        config = transformers.GptOssConfig(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def moe_layout(kind: str, width: int = WIDTH) -> Layout:
    is_transposed = kind == "gptoss"
    targets = [Target(Q, 0, "q", TargetKind.LINEAR, HIDDEN, HIDDEN)]
    for part, name in enumerate((GATE, UP)):
        outputs = {"outputs": (part * width, (part + 1) * width)}
        turns = {"block_sizes": (1, 1), "block_part": part, "transposed": True}
        other = OtherName(f"{EXPERTS}.gate_up_proj", **(turns if is_transposed else outputs))
        sizes = (HIDDEN, width, NUM_EXPERTS)
        targets.append(Target(name, 0, "gate_up", TargetKind.EXPERTS, *sizes, other_names=(other,)))
    other = OtherName(f"{EXPERTS}.down_proj", transposed=is_transposed)
    sizes = (width, HIDDEN, NUM_EXPERTS)
    targets.append(Target(DOWN, 0, "down", TargetKind.EXPERTS, *sizes, other_names=(other,)))
    made = Layout("org/moe", "0" * 64, DataType.FLOAT32, 2, tuple(targets))
    validate(made)
    return made


def deltas_of(values: Values, name: str, size_in: int, size_out: int) -> list[torch.Tensor]:
    """Returns what is added to each expert's weight, [out, in]."""
    a, b = (experts_of(values[name, side], size) for side, size in ((A, size_in), (B, size_out)))
    return [second.T @ first for first, second in zip(a, b, strict=True)]
