"""Decoders and zoos whose weights are in few bits, and the weights that transformers has to compare
with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from inference_svc.model.description import Decoder, ExpertsProjection, Projection
from inference_svc.model.quantised.modules import with_projections
from kernels.quantised import Activations, Codes, WeightFormat, quantise
from tests.support.inference.gguf_files import SIZES, write_gguf
from tests.support.models.saved_weights import pack
from tests.support.models.zoo import ALL, AdapterSpec, Zoo, adapted, make_model

FORMATS: Mapping[str, WeightFormat] = {
    "int4": WeightFormat(Codes.INT4, 16, scales="bfloat16"),
    "uint4": WeightFormat(Codes.UINT4, 16, has_offsets=True, scales="float16"),
    "nf4": WeightFormat(Codes.NF4, 16),
    "fp4": WeightFormat(Codes.FP4, 16, scales="bfloat16"),
    "int8": WeightFormat(Codes.INT8),
    "fp8": WeightFormat(Codes.FP8, 16),
    "odd groups": WeightFormat(Codes.INT8, 12),
    "w8a8": WeightFormat(Codes.INT8, activations=Activations.INT8),
}
"""A format of each kind of codes, for small models."""

MXFP4 = "mxfp4"
"""The form of a mixture, whose experts lie in one tensor."""
SPECS = (
    AdapterSpec("plain", 8, ALL),
    AdapterSpec("scaled", 3, ["k_proj", "gate_proj", "lm_head"], {"use_rslora": True}),
    AdapterSpec("dora", 4, ["q_proj", "down_proj"], {"use_dora": True}),
)
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
KINDS = {"embed_tokens": "Q8_0", "v_proj": "Q6_K", "down_proj": "Q6_K", "proj": "Q4_K"}
"""As the files of the type Q4_K_M."""


def with_format(decoder: Decoder, form: WeightFormat) -> Decoder:
    """Returns a decoder all of whose projections have a format, but the first of a fused one, so
    that it has several parts."""

    def formatted(projection: Projection | ExpertsProjection) -> Projection | ExpertsProjection:
        if isinstance(projection, ExpertsProjection):
            return replace(projection, format=form)
        formats = (form,) * len(projection.stored)
        return replace(projection, formats=(None, *formats[1:]) if formats[1:] else formats)

    blocks = tuple(with_projections(block, formatted) for block in decoder.blocks)
    head = decoder.head if decoder.head.is_tied else replace(decoder.head, format=form)
    return replace(decoder, blocks=blocks, head=head)


def dequantise(model: PreTrainedModel, form: WeightFormat) -> None:
    """Rounds the weights of a model as `with_format` has them."""
    plain = ("q_proj", "gate_proj", "embed_tokens")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3 and "experts" in name:
                for expert in parameter:
                    expert.copy_(quantise(expert, form).dequantise())
            elif parameter.dim() == 2 and not name.removesuffix(".weight").endswith(plain):
                parameter.copy_(quantise(parameter, form).dequantise())


def make_gguf(folder: Path) -> tuple[Path, Any]:
    """Returns a GGUF file, and the model that it means."""
    sizes = {**SIZES, "vocab_size": 128, "tie_word_embeddings": True}
    model = make_model("llama", folder / "plain", **PLAIN_ROPE, **sizes)
    path = folder / "llama-Q4_K_M.gguf"
    with torch.no_grad():
        write_gguf(path, "llama", model, KINDS, {})
    return path, model


def make_packed(form: str, kind: str, folder: Path) -> tuple[Path, Any]:
    """Returns a folder with packed weights, and the model that they mean."""
    model = make_model(kind, folder / "model", tie_word_embeddings=False)
    model.load_state_dict(load_file(pack(folder / "model", form) / "model.safetensors"))
    return folder / "model", model


def shake_magnitudes(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_magnitude_vector" in name:
            parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.3))


def zoo_in_few_bits(form: str, folder: Path) -> Zoo:
    """Makes a model in a form, "gguf" or one of `saved_weights.FORMATS`, with adapters of it."""
    kind = "gpt-oss" if form == MXFP4 else "llama"
    path, model = make_gguf(folder) if form == "gguf" else make_packed(form, kind, folder)
    reference = adapted(model, kind, folder / "adapters", SPECS, shake_magnitudes)
    adapters = {spec.name: folder / "adapters" / spec.name for spec in SPECS}
    return Zoo(kind, path, reference, adapters)
