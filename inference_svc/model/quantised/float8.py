"""Checkpoints in FP8 E4M3 of DeepSeek, Qwen and AutoFP8, `quant_method: fp8`, and of FBGEMM,
`quant_method: fbgemm_fp8`.

fp8         a scale for each block, `weight_scale_inv`, or for a tensor, by that name or
            `weight_scale`
fbgemm_fp8  a scale for each output, `weight_scale`

All multiply codes by the scale: "inv" means that weights were divided by it. Inputs are not rounded
to FP8, whether by static or by dynamic scales: the product is with exact inputs, which is closer to
the model that was quantised.

Source: transformers 5, integrations/finegrained_fp8.py and fbgemm_fp8.py; vLLM's fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from inference_svc.model.quantised.names import kept_plain
from inference_svc.model.quantised.packing import broken, finite_scales, float8_rows
from inference_svc.model.quantised.scheme import Rows, StoredMatrix, TensorSpec
from inference_svc.model.quantised.settings import Settings, words
from kernels.quantised import Codes, WeightFormat

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_INPUT_SCALES = ("input_scale", "activation_scale")
_KNOWN = words(
    "quant_method fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers",
    "scale_fmt expert_dtype dequantize",
)
_FBGEMM_KNOWN = words("quant_method activation_scale_ub modules_to_not_convert")


class Float8:
    """A checkpoint in FP8, with all but some linear modules in it."""

    form = "fp8"

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Raises UnsupportedModel for a config that is not honoured."""
        settings.require_known(_KNOWN)
        settings.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        settings.one_of("scale_fmt", ("float", "ue8m0"), "float")
        settings.one_of("expert_dtype", ("fp8",), "fp8")
        self._block = _block(settings)
        # vLLM, for which AutoFP8 wrote, never reads a head in FP8, whatever the list has.
        self._plain = kept_plain(settings, "modules_to_not_convert", "ignored_layers", adds=True)

    @property
    def name(self) -> str:
        """See `Scheme`."""
        return f"fp8, {'blocks of {} x {}'.format(*self._block) if self._block else 'per tensor'}"

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """See `Scheme`."""
        if num_experts or module in self._plain:
            return None
        weight = TensorSpec((out_features, in_features), ("F8_E4M3",))
        inputs = {each: TensorSpec((1,), _SCALES, is_optional=True) for each in _INPUT_SCALES}
        if self._block is None:
            either = TensorSpec((1,), _SCALES, is_optional=True)
            scales = {"weight_scale": either, "weight_scale_inv": either}
            tensors = {"weight": weight, **scales, **inputs}
            form = WeightFormat(Codes.FP8)
            return StoredMatrix(form, tensors, _decode_tensor, one_of=tuple(scales))
        rows, columns = self._block
        shape = (-(-out_features // rows), -(-in_features // columns))
        blocks = TensorSpec(shape, _SCALES)
        form = WeightFormat(Codes.FP8, columns)
        return StoredMatrix(
            form,
            {"weight": weight, "weight_scale_inv": blocks, **inputs},
            partial(_decode_blocks, form, rows),
        )


class FbgemmFloat8:
    """A checkpoint of FBGEMM's FP8, with a scale for each output."""

    name = "fbgemm_fp8, per output"
    form = "fp8"

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Raises UnsupportedModel for a config that is not honoured."""
        settings.require_known(_FBGEMM_KNOWN)
        self._plain = kept_plain(settings, "modules_to_not_convert")

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """See `Scheme`."""
        if num_experts or module in self._plain:
            return None
        tensors = {
            "weight": TensorSpec((out_features, in_features), ("F8_E4M3",)),
            "weight_scale": TensorSpec((out_features, 1), _SCALES),
            "input_scale_ub": TensorSpec((1,), _SCALES, is_optional=True),
        }
        return StoredMatrix(WeightFormat(Codes.FP8), tensors, _decode_outputs)


def _block(settings: Settings) -> tuple[int, int] | None:
    """Returns the outputs and inputs of a block; None for one scale."""
    sizes = settings.get("weight_block_size")
    if sizes is None:
        return None
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or any(type(each) is not int or not 8 <= each <= 65536 for each in sizes):
        raise settings.refused("weight_block_size", "must be two sizes, such as [128, 128]")
    return sizes[0], sizes[1]


def _decode_tensor(tensors: Mapping[str, Tensor]) -> Rows:
    ends = [each for each in ("weight_scale", "weight_scale_inv") if each in tensors]
    if len(ends) != 1:
        raise broken("weight_scale", f"of it and weight_scale_inv there are {len(ends)}, must be 1")
    scale = finite_scales(ends[0], tensors[ends[0]].float())
    weight = tensors["weight"]
    return float8_rows(WeightFormat(Codes.FP8), weight, scale.reshape(1, 1).expand(len(weight), 1))


def _decode_outputs(tensors: Mapping[str, Tensor]) -> Rows:
    scales = finite_scales("weight_scale", tensors["weight_scale"].float())
    return float8_rows(WeightFormat(Codes.FP8), tensors["weight"], scales)


def _decode_blocks(form: WeightFormat, rows: int, tensors: Mapping[str, Tensor]) -> Rows:
    scales = finite_scales("weight_scale_inv", tensors["weight_scale_inv"].float())
    weight = tensors["weight"]
    return float8_rows(form, weight, scales.repeat_interleave(rows, dim=0)[: len(weight)])
