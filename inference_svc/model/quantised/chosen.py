"""Formats that a server chooses for the weights of a plain checkpoint, which quantises them while
it reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import Decoder, ExpertsProjection, Projection
from inference_svc.model.quantised.modules import with_projections
from kernels.quantised import Codes, WeightFormat

GROUP_SIZES = (128, 64, 32)
"""The sizes of groups of INT4: the largest that divides the inputs is taken."""
SMALLEST_PART = 16
"""Layers with fewer outputs than this part of their inputs stay plain: they are a small part of the
bytes, and what they make, such as gates and decays, enters everything behind them."""
PLAIN = ("router", "shared_gate")
"""Projections that stay plain: they decide which experts compute a token."""


def with_chosen_format(decoder: Decoder, codes: str) -> Decoder:
    """Returns a decoder whose layers have weights of these codes, "int4", "int8" or "fp8"; or the
    decoder as it is, "none". The embedding and the head stay plain.

    Raises UnsupportedModel for a checkpoint that is quantised already.
    """
    if codes == "none":
        return decoder
    if decoder.quantisation is not None:
        raise UnsupportedModel(
            f"--quantize {codes}: the checkpoint is quantised already ({decoder.quantisation.name})"
            "; leave the setting out, or serve the plain checkpoint"
        )
    formats = _FORMATS[codes]

    def chosen(projection: Projection | ExpertsProjection) -> Projection | ExpertsProjection:
        found = formats.get(_group_size(projection.in_features, codes))
        if projection.name in PLAIN or found is None:
            return projection
        if isinstance(projection, ExpertsProjection):
            return replace(projection, format=found)
        smallest = projection.in_features // SMALLEST_PART
        stored = projection.stored
        kept = tuple(found if each.out_features >= smallest else None for each in stored)
        return replace(projection, formats=kept) if any(kept) else projection

    blocks = tuple(with_projections(block, chosen) for block in decoder.blocks)
    return replace(decoder, blocks=blocks)


def _group_size(in_features: int, codes: str) -> int | None:
    """Returns the size of groups; None if no group divides the inputs."""
    if codes != Codes.INT4.value:
        return 0
    return next((size for size in GROUP_SIZES if in_features % size == 0), None)


_FORMATS: Mapping[str, Mapping[int | None, WeightFormat]] = {
    "int4": {size: WeightFormat(Codes.INT4, size, scales="bfloat16") for size in GROUP_SIZES},
    "int8": {0: WeightFormat(Codes.INT8)},
    "fp8": {0: WeightFormat(Codes.FP8)},
}
"""By the names that users choose, and by the size of groups."""
