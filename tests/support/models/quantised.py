"""Decoders whose weights have formats, and the weights that transformers has to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from inference_svc.model.description import Decoder, ExpertsProjection, Projection
from inference_svc.model.quantised.modules import with_projections
from kernels.quantised import Activations, Codes, WeightFormat, quantise

FORMATS: Mapping[str, WeightFormat] = {
    "int4": WeightFormat(Codes.INT4, 16, scales="bfloat16"),
    "uint4": WeightFormat(Codes.UINT4, 16, has_offsets=True, scales="float16"),
    "nf4": WeightFormat(Codes.NF4, 16),
    "fp4": WeightFormat(Codes.FP4, 16, scales="bfloat16"),
    "int8": WeightFormat(Codes.INT8),
    "fp8": WeightFormat(Codes.FP8, 16),
    "w8a8": WeightFormat(Codes.INT8, activations=Activations.INT8),
}
"""A format of each kind of codes, for small models."""


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
