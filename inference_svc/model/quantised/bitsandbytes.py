"""Checkpoints of bitsandbytes, `quant_method: bitsandbytes`: NF4, whose scales may be quantised
themselves, and INT8.

Source: `QuantState` in bitsandbytes/functional.py and Linear8bitLt in bitsandbytes/nn/modules.py,
0.50.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.names import kept_plain
from inference_svc.model.quantised.packing import broken, finite_scales, unpack
from inference_svc.model.quantised.scheme import Rows, StoredMatrix, TensorSpec
from inference_svc.model.quantised.settings import NEXT_STEP, Settings, words
from kernels.quantised import Codes, QuantisedRows, WeightFormat

_BLOCK = 64
"""The weights of a block where nobody says otherwise, and nobody does. Only the file knows, so
blocks of a multiple are groups of this size with equal scales."""
_MAX_BLOCK = 4096
_STATE = "weight.quant_state.bitsandbytes__nf4"
_MAX_STATE_BYTES = 4096
_NUM_NESTED_CODES = 256
_BY_127 = 7.874015718698502e-3
"""The reciprocal of 127 that bitsandbytes multiplies by."""
_STORAGE = {"uint8": ("U8", 1), "int8": ("I8", 1), "float16": ("F16", 2)}
_STORAGE |= {"bfloat16": ("BF16", 2), "float32": ("F32", 4), "float64": ("F64", 8)}
_KNOWN = words(
    "quant_method load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit llm_int8_skip_modules",
    "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage",
    # How its kernels compute: products here are with exact inputs, and dequantise in fp32.
    "bnb_4bit_compute_dtype llm_int8_threshold llm_int8_enable_fp32_cpu_offload",
)


class BitsAndBytes:
    """A checkpoint of bitsandbytes, with all but some linear modules in NF4 or INT8."""

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Raises UnsupportedModel for a config that is not honoured."""
        settings.require_empty("llm_int8_has_fp16_weight", "its weights are plain")
        settings.require_known({*_KNOWN, "llm_int8_has_fp16_weight"})
        self._is_int8 = settings.flag("load_in_8bit")
        if settings.flag("load_in_4bit") is self._is_int8:
            raise settings.refused("load_in_4bit", "either this or load_in_8bit must be true")
        self._plain = kept_plain(settings, "llm_int8_skip_modules")
        self._is_nested = settings.flag("bnb_4bit_use_double_quant")
        storage = settings.one_of("bnb_4bit_quant_storage", tuple(_STORAGE), "uint8")
        self._storage = _STORAGE[storage]
        if not self._is_int8:
            settings.one_of("bnb_4bit_quant_type", ("nf4",), "fp4")

    @property
    def form(self) -> str:
        """See `Scheme`."""
        return "int8" if self._is_int8 else "nf4"

    @property
    def name(self) -> str:
        """See `Scheme`."""
        if self._is_int8:
            return "bitsandbytes, int8"
        return f"bitsandbytes, nf4{' with quantised scales' if self._is_nested else ''}"

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """See `Scheme`."""
        if num_experts or module in self._plain:
            return None
        if self._is_int8:
            return StoredMatrix(
                WeightFormat(Codes.INT8),
                {
                    "weight": TensorSpec((out_features, in_features), ("I8",)),
                    "SCB": TensorSpec((out_features,), ("F32",)),
                    "weight_format": TensorSpec((1,), ("U8",), is_optional=True),
                },
                _decode_int8,
            )
        # Blocks run on over the ends of rows: then rows have no groups.
        form = None if in_features % _BLOCK else WeightFormat(Codes.NF4, _BLOCK)
        return StoredMatrix(
            form,
            self._nf4_tensors(module, out_features * in_features),
            partial(_decode_nf4, form, (out_features, in_features)),
        )

    def _nf4_tensors(self, module: str, num_weights: int) -> dict[str, TensorSpec]:
        dtype, item_bytes = self._storage
        num_bytes = -(-num_weights // 2)
        if num_bytes % item_bytes:
            raise UnsupportedModel(
                f"{module}: {num_bytes} bytes are no multiple of bnb_4bit_quant_storage's; "
                f"{NEXT_STEP}"
            )
        most_blocks = -(-num_weights // _BLOCK)
        tensors = {
            "weight": TensorSpec((num_bytes // item_bytes, 1), (dtype,)),
            "weight.absmax": TensorSpec((-most_blocks,), ("U8" if self._is_nested else "F32",)),
            "weight.quant_map": TensorSpec((len(Codes.NF4.table),), ("F32",)),
            _STATE: TensorSpec((-_MAX_STATE_BYTES,), ("U8",)),
        }
        if self._is_nested:
            tensors["weight.nested_absmax"] = TensorSpec((-most_blocks,), ("F32",))
            tensors["weight.nested_quant_map"] = TensorSpec((_NUM_NESTED_CODES,), ("F32",))
        return tensors


def _decode_int8(tensors: Mapping[str, Tensor]) -> Rows:
    """Returns rows with the scale SCB / 127. The library multiplies a code by SCB and then by 1 /
    127, in fp32: its weights may differ from these in their last bit of fp32."""
    layout = tensors.get("weight_format")
    if layout is not None and int(layout.reshape(-1)[0]):
        raise broken("weight_format", f"is {int(layout.reshape(-1)[0])}, supported is 0, rows")
    scales = finite_scales("SCB", tensors["SCB"])
    if (scales < 0).any():
        raise broken("SCB", "has negative maxima")
    form = WeightFormat(Codes.INT8)
    return QuantisedRows(form, tensors["weight"].view(torch.uint8), (scales * _BY_127)[:, None])


def _decode_nf4(
    form: WeightFormat | None, shape: tuple[int, int], tensors: Mapping[str, Tensor]
) -> Rows:
    state = _State(tensors[_STATE], shape)
    if not torch.allclose(tensors["weight.quant_map"], Codes.NF4.table, atol=1e-6):
        raise broken("weight.quant_map", "has other values than NF4's")
    scales = _scales(state, shape[0] * shape[1], tensors)
    # The first of two weights is in the high bits of a byte.
    low_first = unpack(tensors["weight"].reshape(1, -1), 4).view(-1, 2)
    codes = low_first.flip(1).reshape(-1)[: shape[0] * shape[1]].view(shape)
    if form is None:
        values = Codes.NF4.table[codes.int()].view(-1)
        values *= scales.repeat_interleave(state.block)[: len(values)]
        return values.view(shape)
    scales = scales.repeat_interleave(state.block // _BLOCK)[: codes.numel() // _BLOCK]
    return QuantisedRows(form, codes, scales.view(shape[0], -1))


class _State:
    """The facts that bitsandbytes stores as JSON in a tensor of bytes."""

    def __init__(self, stored: Tensor, shape: tuple[int, int]) -> None:
        """Raises UnsupportedModel for contents that cannot be meant."""
        try:
            values = json.loads(bytes(stored.tolist()))
        except (ValueError, RecursionError) as error:
            raise broken(_STATE, "is no JSON") from error
        if not isinstance(values, dict):
            raise broken(_STATE, "is no JSON object")
        self._values: dict[str, Any] = values
        if values.get("quant_type") != "nf4":
            raise self._refused("quant_type", "must be 'nf4'")
        if values.get("shape") not in (list(shape), None):
            raise self._refused("shape", f"must be {list(shape)}")
        self.block = self._size("blocksize")
        if self.block % _BLOCK:
            raise self._refused("blocksize", f"must be a multiple of {_BLOCK}")

    @property
    def nested_block(self) -> int:
        return self._size("nested_blocksize")

    @property
    def nested_offset(self) -> float:
        value = self._values.get("nested_offset")
        if not isinstance(value, int | float) or not abs(value) < torch.finfo(torch.float32).max:
            raise self._refused("nested_offset", "must be a number")
        return float(value)

    def _size(self, key: str) -> int:
        value = self._values.get(key)
        if type(value) is not int or not 1 <= value <= _MAX_BLOCK or value & (value - 1):
            raise self._refused(key, f"must be a power of two up to {_MAX_BLOCK}")
        return value

    def _refused(self, key: str, reason: str) -> UnsupportedModel:
        return broken(_STATE, f"{key} = {str(self._values.get(key))[:80]!r}: {reason}")


def _scales(state: _State, num_weights: int, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the scale of each block, fp32 [blocks]."""
    absmax = tensors["weight.absmax"]
    num_blocks = -(-num_weights // state.block)
    if len(absmax) != num_blocks:
        raise broken("weight.absmax", f"has {len(absmax)} scales, must be {num_blocks}")
    if "weight.nested_absmax" not in tensors:
        return _maxima("weight.absmax", absmax)
    nested = _maxima("weight.nested_absmax", tensors["weight.nested_absmax"])
    num_nested = -(-num_blocks // state.nested_block)
    if len(nested) != num_nested:
        raise broken("weight.nested_absmax", f"has {len(nested)} scales, must be {num_nested}")
    table = finite_scales("weight.nested_quant_map", tensors["weight.nested_quant_map"])
    scales = table[absmax.int()]
    scales *= nested.repeat_interleave(state.nested_block)[:num_blocks]
    # A scale may be less than 0 by rounding, where a block is of zeros.
    return finite_scales("weight.nested_absmax", scales + state.nested_offset)


def _maxima(end: str, values: Tensor) -> Tensor:
    scales = finite_scales(end, values)
    if (scales < 0).any():
        raise broken(end, "has negative maxima")
    return scales
