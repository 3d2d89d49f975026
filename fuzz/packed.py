"""Fuzzes weights in few bits, and the configs that describe them, made by strangers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from fuzz.refusals import refused
from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised import Rows, StoredMatrix, read_scheme
from kernels.quantised import QuantisedRows

SEPARATOR = b"\xff\xff\xff\xff"
MODULE = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
MAX_ELEMENTS = 1 << 14
"""The most elements of a weight: configs that only ask for larger ones teach nothing."""
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


def fuzz_packed(data: bytes) -> None:
    """Reads sizes of a weight with a config.json, and a file with the tensors of that weight by the
    ends of their names: they are refused, or make a finite weight of these sizes."""
    settings, _, file = data.partition(SEPARATOR)
    try:
        case = json.loads(settings)
        sizes, config = _sizes(case["sizes"]), dict(case["config"])
        tensors = dict(deserialize(file))
    except (ValueError, LookupError, TypeError, RecursionError, SafetensorError):
        return
    with refused(UnsupportedModel):
        scheme = read_scheme(config)
        if scheme is None:
            raise UnsupportedModel("config.json: has no quantisation")
        *experts, out_features, in_features = sizes
        matrix = scheme.matrix(EXPERTS if experts else MODULE, out_features, in_features, *experts)
        if matrix is None:
            raise UnsupportedModel("config.json: leaves the weight plain")
        for rows in _decoded(matrix, _checked(matrix, tensors), *experts):
            values = rows.dequantise() if isinstance(rows, QuantisedRows) else rows
            assert values.shape == (out_features, in_features)
            assert torch.isfinite(values).all()


def _sizes(sizes: Any) -> tuple[int, ...]:
    """Raises ValueError for sizes that no description of a model has."""
    sizes = tuple(sizes)
    if len(sizes) not in (2, 3) or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(sizes)
    if math.prod(sizes) > MAX_ELEMENTS:
        raise ValueError(sizes)
    return sizes


def _checked(matrix: StoredMatrix, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors that a weight is made of. Raises UnsupportedModel as the check of a whole
    folder does."""
    found: dict[str, Tensor] = {}
    for end, spec in matrix.tensors.items():
        if end not in stored:
            if not spec.is_optional:
                raise UnsupportedModel(f"missing tensors: {end}")
            continue
        shape, dtype = tuple(stored[end]["shape"]), stored[end]["dtype"]
        if not spec.fits(shape) or dtype not in spec.dtypes:
            raise UnsupportedModel(f"{end} has shape {shape} and dtype {dtype}")
        values = bytearray(stored[end]["data"])
        found[end] = torch.frombuffer(values, dtype=_DTYPES[dtype]).view(shape or (1,))
    return found


def _decoded(
    matrix: StoredMatrix, tensors: Mapping[str, Tensor], num_experts: int = 0
) -> Iterator[Rows]:
    """Yields the weight, or the weight of each expert."""
    if not num_experts:
        yield matrix.decode(tensors)
    for expert in range(num_experts):
        yield matrix.decode({end: each[expert] for end, each in tensors.items()})
