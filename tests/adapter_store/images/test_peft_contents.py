"""What PEFT itself saves besides A and B, read and compiled: the segments are PEFT's tensors, and
compute what PEFT computes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.core import DataType, Layout, SegmentKind, Target, TargetKind
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.compile import compile_image
from adapter_store.images.layout_checks import validate
from tests.adapter_store.images.test_format_2 import values_of

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


def make_model(**options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
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


def check_format_1(checkpoint: Checkpoint, kind: str) -> None:
    with pytest.raises(IncompatibleAdapter, match=kind) as caught:
        compile_image(checkpoint, layout(image_format=1))
    assert caught.value.reason == "FORMAT_TOO_OLD"


def module(adapted: Any, name: str) -> Any:
    return adapted.get_submodule(f"base_model.model.{name}")


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_bias_of_b_is_scaled_as_peft_scales_it(tmp_path, use_rslora):
    options = {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 3}}
    adapted = adapt(tmp_path, lora_bias=True, use_rslora=use_rslora, **options)
    checkpoint, values = compiled(tmp_path)
    x = torch.randn(7, HIDDEN)
    for name in (Q, V):
        layer = module(adapted, name)
        scale = layer.scaling["default"]
        assert values[name, SegmentKind.BIAS].equal(scale * layer.lora_B["default"].bias)
        added = x @ values[name, A].T @ values[name, B] + values[name, SegmentKind.BIAS]
        torch.testing.assert_close(layer.base_layer(x) + added, layer(x))
    assert checkpoint.segment_kinds == (SegmentKind.BIAS,)
    check_format_1(checkpoint, "bias")


def test_magnitudes_of_dora_are_pefts(tmp_path):
    """The norms of DoRA are the server's to compute: here by their definition."""
    names = ["q_proj", "k_proj", "embed_tokens", "lm_head"]
    adapted = adapt(tmp_path, use_dora=True, target_modules=names, save_embedding_layers=False)
    checkpoint, values = compiled(tmp_path)
    assert checkpoint.segment_kinds == (SegmentKind.MAGNITUDE,)
    for name in (Q, K, HEAD):
        layer, x = module(adapted, name), torch.randn(7, HIDDEN)
        magnitude = values[name, SegmentKind.MAGNITUDE]
        assert magnitude.equal(layer.lora_magnitude_vector["default"].weight)
        weight = layer.base_layer.weight + values[name, B].T @ values[name, A]
        weight = weight * (magnitude / weight.norm(dim=1))[:, None]
        bias = layer.base_layer.bias
        torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), layer(x))
    layer, ids = module(adapted, EMBEDDING), torch.arange(VOCAB)
    magnitude = values[EMBEDDING, SegmentKind.MAGNITUDE]
    assert magnitude.equal(layer.lora_magnitude_vector["default"].weight)
    weight = layer.base_layer.weight + values[EMBEDDING, A] @ values[EMBEDDING, B]
    torch.testing.assert_close(weight * magnitude / weight.norm(dim=0), layer(ids))
    check_format_1(checkpoint, "magnitude")
