"""Random codes, scales and zero points come back from each packed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference_svc.model.quantised import StoredMatrix, read_scheme
from kernels.quantised import QuantisedRows, WeightFormat
from tests.support.models.saved_weights import as_awq, by_column, by_row

MODULE = "model.layers.0.mlp.up_proj"
SIZES = st.sampled_from([8, 16, 32, -1])
BITS = st.sampled_from([4, 8])
SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=40, deadline=None)


class Weight:
    """Random codes, scales and zero points of a weight [out, in], and its values."""

    def __init__(self, shape: tuple[int, int], size: int, bits: int, seed: int, *, zeros: bool):
        self.generator = torch.Generator().manual_seed(seed)
        num_groups = 1 if size == -1 else -(-shape[1] // size)
        self.codes = self._codes(shape, 0, 1 << bits)
        self.scales = torch.randn(shape[0], num_groups, generator=self.generator).half()
        middle = torch.full_like(self.scales, 1 << bits - 1, dtype=torch.int64)
        # Version 1 of GPTQ's format has neither 0 nor 2 ** bits.
        self.zeros = self._codes(self.scales.shape, 1, 1 << bits) if zeros else middle
        self.groups = torch.arange(shape[1]) // (shape[1] if size == -1 else size)

    @property
    def values(self) -> Tensor:
        codes = self.codes.double() - self.zeros[:, self.groups]
        return (codes * self.scales[:, self.groups].double()).float()

    def shuffle(self) -> None:
        order = torch.randperm(len(self.groups), generator=self.generator)
        self.groups = self.groups[order]

    def _codes(self, shape: tuple[int, ...], low: int, end: int) -> Tensor:
        return torch.randint(low, end, shape, generator=self.generator)


def matrix_of(config: dict[str, Any], weight: Weight) -> StoredMatrix:
    scheme = read_scheme({"quantization_config": config, "torch_dtype": "float16"})
    assert scheme is not None
    matrix = scheme.matrix(MODULE, *weight.codes.shape)
    assert matrix is not None
    return matrix


def require_values(matrix: StoredMatrix, tensors: Mapping[str, Tensor], weight: Weight) -> None:
    for end, tensor in tensors.items():
        assert matrix.tensors[end].fits(tensor.shape), end
        assert NAMES[tensor.dtype] in matrix.tensors[end].dtypes, end
    assert {end for end, spec in matrix.tensors.items() if not spec.is_optional} <= set(tensors)
    rows = matrix.decode(tensors)
    if isinstance(rows, QuantisedRows):
        assert rows.format == matrix.format
        rows = rows.dequantise()
    assert torch.equal(rows, weight.values)


NAMES = {torch.int32: "I32", torch.int64: "I64", torch.float16: "F16"}


@FEW
@given(SEEDS, BITS, SIZES, st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_compressed_tensors(
    seed: int, bits: int, size: int, num_outputs: int, num_groups: int, has_zeros: bool
) -> None:
    in_features = 37 if size == -1 else num_groups * size
    weight = Weight((num_outputs, in_features), size, bits, seed, zeros=has_zeros)
    args = {"num_bits": bits, "group_size": size, "symmetric": not has_zeros}
    config = packed(args | {"strategy": "channel" if size == -1 else "group"})
    tensors = {
        "weight_packed": by_row(weight.codes, bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = by_column(weight.zeros, bits)
    require_values(matrix_of(config, weight), tensors, weight)


@FEW
@given(SEEDS, BITS, st.booleans())
def test_compressed_tensors_in_the_order_of_activations(
    seed: int, bits: int, has_zeros: bool
) -> None:
    weight = Weight((5, 96), 32, bits, seed, zeros=has_zeros)
    weight.shuffle()
    args = {"num_bits": bits, "group_size": 32, "symmetric": not has_zeros, "actorder": "group"}
    tensors = {
        "weight_packed": by_row(weight.codes, bits),
        "weight_scale": weight.scales,
        "weight_g_idx": weight.groups.int(),
    }
    if has_zeros:
        tensors["weight_zero_point"] = by_column(weight.zeros, bits)
    matrix = matrix_of(packed(args), weight)
    assert matrix.format is None
    require_values(matrix, tensors, weight)


def packed(args: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
    }


@FEW
@given(SEEDS, BITS, SIZES, st.integers(1, 9), st.integers(1, 5), *[st.booleans() for _ in range(3)])
def test_gptq(
    seed: int,
    bits: int,
    size: int,
    num_outputs: int,
    num_words: int,
    has_zeros: bool,
    is_v2: bool,
    has_act_order: bool,
) -> None:
    weight = Weight((num_outputs, num_words * 8), size, bits, seed, zeros=has_zeros)
    if has_act_order:
        weight.shuffle()
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": not has_zeros,
        "desc_act": has_act_order,
        "checkpoint_format": "gptq_v2" if is_v2 else "gptq",
    }
    tensors = {
        "qweight": by_column(weight.codes.T, bits),
        "qzeros": by_row((weight.zeros - int(not is_v2)).T, bits),
        "scales": weight.scales.T.contiguous(),
        "g_idx": weight.groups.int(),
    }
    matrix = matrix_of(config, weight)
    assert (matrix.format is None) == (has_act_order and size != -1)
    require_values(matrix, tensors, weight)


@FEW
@given(SEEDS, SIZES, st.integers(1, 4), st.integers(1, 3))
def test_awq(seed: int, size: int, num_words: int, num_groups: int) -> None:
    in_features = 40 if size == -1 else num_groups * size
    weight = Weight((num_words * 8, in_features), size, 4, seed, zeros=True)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    tensors = {
        "qweight": as_awq(weight.codes),
        "qzeros": as_awq(weight.zeros),
        "scales": weight.scales.T.contiguous(),
    }
    require_values(matrix_of(config, weight), tensors, weight)


def test_scales_keep_the_models_dtype_where_they_are_exact_in_it() -> None:
    form = matrix_of(packed({"num_bits": 4, "group_size": 8}), Weight((1, 8), 8, 4, 0, zeros=False))
    assert str(form.format) == "int4, groups of 8"
    assert form.format == WeightFormat(form.format.codes, 8, scales="float16")
