"""Formats that a server chooses for the weights of a plain checkpoint, which quantises them while
it reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import Block, Decoder, ExpertsProjection, Projection
from inference_svc.model.quantised.modules import with_projections
from kernels.quantised import Codes, WeightFormat

GROUP_SIZES = (128, 64, 32)
"""The sizes of groups of INT4: the largest that divides the inputs of every layer is taken, since
other engines take one for a whole checkpoint."""
SMALLEST_PART = 16
"""Layers with fewer outputs than this part of their inputs stay plain: they are a small part of the
bytes, and what they make, such as gates and decays, enters everything behind them."""
_SCALES = ("bfloat16", "float16")
"""The dtypes of models that scales of groups have, too, as other engines want them."""
PLAIN = ("router", "shared_gate")
"""Projections that stay plain: they decide which experts compute a token."""


def with_chosen_format(decoder: Decoder, codes: str, dtype: str) -> Decoder:
    """Returns a decoder whose layers have weights of these codes, "int4", "int8" or "fp8"; or the
    decoder as it is, "none". The embedding and the head stay plain. `dtype` is the checkpoint's.

    Raises UnsupportedModel for a checkpoint that is quantised already, and for one of which every
    layer would stay plain.
    """
    if codes == "none":
        return decoder
    if decoder.quantisation is not None:
        raise UnsupportedModel(
            f"--quantize {codes}: the checkpoint is quantised already ({decoder.quantisation.name})"
            "; leave the setting out, or serve the plain checkpoint"
        )
    sizes = {each.in_features for block in decoder.blocks for each in _projections(block)}
    form = _chosen_format(codes, sizes, dtype)

    def chosen(projection: Projection | ExpertsProjection) -> Projection | ExpertsProjection:
        in_features = projection.in_features
        has_groups = in_features % (form.group_size or 1) == 0 and in_features <= form.max_inputs
        if projection.name in PLAIN or not has_groups:
            return projection
        if isinstance(projection, ExpertsProjection):
            return replace(projection, format=form)
        smallest = projection.in_features // SMALLEST_PART
        stored = projection.stored
        kept = tuple(form if each.out_features >= smallest else None for each in stored)
        return replace(projection, formats=kept) if any(kept) else projection

    blocks = tuple(with_projections(block, chosen) for block in decoder.blocks)
    if blocks == decoder.blocks:
        raise UnsupportedModel(
            f"--quantize {codes}: every layer would stay plain, because all have few outputs, or "
            "inputs that groups do not divide; serve the model without it"
        )
    return replace(decoder, blocks=blocks)


def weight_form(decoder: Decoder, codes: str) -> str:
    """Returns the form that most weights have in the checkpoint, or that a server quantises them
    to: "nf4", "int4", "int8", "fp8", "mxfp4", or "gguf" and the type of most layers; several words
    where a checkpoint has several; "" if they are plain. `codes` are as `with_chosen_format` has
    them."""
    if decoder.quantisation is not None:
        return decoder.quantisation.form
    return "" if codes == "none" else codes


def _chosen_format(codes: str, sizes: Collection[int], dtype: str) -> WeightFormat:
    """Returns the format of layers with these numbers of inputs, of a checkpoint in this dtype.
    Raises UnsupportedModel if groups of INT4 divide none of them."""
    if codes != Codes.INT4.value:
        return WeightFormat(Codes(codes))
    grouped = [size for size in sizes if size % GROUP_SIZES[-1] == 0]
    if not grouped:
        raise UnsupportedModel(
            f"int4: no layer has a multiple of {GROUP_SIZES[-1]} inputs, which its groups "
            "need; choose int8"
        )
    found = next(size for size in GROUP_SIZES if all(each % size == 0 for each in grouped))
    scales = dtype if dtype in _SCALES else "float32"
    return WeightFormat(Codes.INT4, found, scales=scales)


def _projections(block: Block) -> list[Projection | ExpertsProjection]:
    found: list[Projection | ExpertsProjection] = []

    def add(projection: Projection | ExpertsProjection) -> Projection | ExpertsProjection:
        found.append(projection)
        return projection

    with_projections(block, add)
    return [each for each in found if each.name not in PLAIN]
