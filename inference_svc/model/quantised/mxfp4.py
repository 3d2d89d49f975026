"""Checkpoints of gpt-oss, `quant_method: mxfp4`: the experts' weights, each in one tensor.

A block of 32 inputs has codes of E2M1, the first of two in the low bits of a byte, and the exponent
of its scale, 2 ** (exponent - 127), in a byte of its own.

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf and
`convert_moe_packed_tensors` in transformers/integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.names import kept_plain
from inference_svc.model.quantised.packing import broken, unpack
from inference_svc.model.quantised.scheme import Rows, StoredMatrix, TensorSpec
from inference_svc.model.quantised.settings import NEXT_STEP, Settings, words
from kernels.quantised import Codes, QuantisedRows, WeightFormat

_BLOCK = 32
_FORMAT = WeightFormat(Codes.FP4, _BLOCK, scales="bfloat16")
_MAX_EXPONENT = 252
"""The largest whose scale times 6, the largest code, is a number in bfloat16; 255 is NaN."""
_SUBNORMAL = 0x40
"""The bits of 2 ** -127 in bfloat16, whose exponent is 0."""
_MANTISSA_BITS = 7
_KNOWN = words("quant_method modules_to_not_convert dequantize")


class Mxfp4:
    """A checkpoint of gpt-oss. Only experts are quantised, whatever else its list leaves out."""

    name = "mxfp4, groups of 32"
    form = "mxfp4"

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Raises UnsupportedModel for a config that is not honoured."""
        settings.require_known(_KNOWN)
        self._plain = kept_plain(settings, "modules_to_not_convert")

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """See `Scheme`. Raises UnsupportedModel if inputs do not divide into blocks."""
        if not num_experts or module in self._plain:
            return None
        if in_features % _BLOCK:
            raise UnsupportedModel(
                f"{module}: {in_features} inputs are no multiple of {_BLOCK}; {NEXT_STEP}"
            )
        blocks = (num_experts, out_features, in_features // _BLOCK)
        return StoredMatrix(
            _FORMAT,
            {
                "_blocks": TensorSpec((*blocks, _BLOCK // 2), ("U8",)),
                "_scales": TensorSpec(blocks, ("U8",)),
            },
            _decode,
        )


def _decode(tensors: Mapping[str, Tensor]) -> Rows:
    exponents = tensors["_scales"].short()
    if int(exponents.max()) > _MAX_EXPONENT:
        raise broken(
            "_scales", f"has exponents above {_MAX_EXPONENT}, of weights that are no number"
        )
    bits = torch.where(exponents > 0, exponents << _MANTISSA_BITS, _SUBNORMAL)
    codes = unpack(tensors["_blocks"].flatten(1), 4)
    return QuantisedRows(_FORMAT, codes, bits.short().view(torch.bfloat16))
