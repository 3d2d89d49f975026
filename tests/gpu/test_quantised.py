"""Products with weights in few bits against their definition, and rows that do not depend on their
neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import experts, quantised
from kernels.experts import Choice, Pairs, padded_rows
from kernels.quantised import (
    Activations,
    Codes,
    QuantisedRows,
    QuantisedWeight,
    WeightFormat,
    cpu,
    quantise,
    reference,
)

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.real),
]
FORMATS = {
    "int4": WeightFormat(Codes.INT4, 128, scales="bfloat16"),
    "int4, small groups": WeightFormat(Codes.INT4, 16, scales="float16"),
    "uint4": WeightFormat(Codes.UINT4, 64, has_offsets=True, scales="float16"),
    "nf4": WeightFormat(Codes.NF4, 64),
    "fp4": WeightFormat(Codes.FP4, 32, scales="bfloat16"),
    "int8": WeightFormat(Codes.INT8),
    "int8, groups": WeightFormat(Codes.INT8, 32, scales="float16"),
    "fp8": WeightFormat(Codes.FP8),
    "fp8, blocks": WeightFormat(Codes.FP8, 128),
    "w8a8": WeightFormat(Codes.INT8, activations=Activations.INT8),
}
OUT, IN = 200, 448


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def relative(found: Tensor, wanted: Tensor) -> float:
    """Returns the relative RMS of the difference."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    difference = (found.double().cpu() - wanted.double()).square().mean().sqrt()
    return float(difference / wanted.double().square().mean().sqrt())


def weight_of(rows: QuantisedRows, device: torch.device) -> QuantisedWeight:
    weight = QuantisedWeight.empty(rows.format, *rows.codes.shape, device)
    weight.put_rows(0, rows)
    return weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 70])
@pytest.mark.parametrize("name", FORMATS)
def test_products(device, on_device, name, num_rows, dtype):
    rows = quantise(numbers(OUT, IN), FORMATS[name])
    x, bias = numbers(num_rows, IN).to(dtype), numbers(OUT).to(dtype)
    wanted = reference.linear(x, rows, bias)
    with on_device():
        found = quantised.linear(x.to(device), weight_of(rows, device), bias.to(device))
    assert relative(found, wanted) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", Codes)
def test_every_code_has_its_value(device, on_device, codes, dtype):
    """Also where the bits of a code are a number below the normal ones."""
    every = torch.arange(len(codes.table), dtype=torch.uint8)[:, None].repeat(1, 64)
    if codes is Codes.FP8:  # 0 times NaN is NaN: the inputs that are 0 have other codes
        every[:, 1:] = 0
    rows = QuantisedRows(WeightFormat(codes), every, torch.ones(len(every), 1))
    for num_rows in (1, 20):
        x = torch.zeros(num_rows, 64, dtype=dtype)
        x[:, 0] = 1
        with on_device():
            found = quantised.linear(x.to(device), weight_of(rows, device))
        wanted = codes.table.to(dtype).expand(num_rows, -1)
        assert torch.equal(found.cpu().nan_to_num(7.7), wanted.nan_to_num(7.7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int4", "uint4", "nf4", "w8a8"])
def test_a_row_does_not_depend_on_its_neighbours(device, on_device, name, dtype):
    """Among few rows, and among many, of any number."""
    weight = weight_of(quantise(numbers(OUT, IN), FORMATS[name]), device)
    x = numbers(130, IN).to(device, dtype)
    with on_device():
        few = quantised.linear(x[:16], weight)
        many = quantised.linear(x, weight)
        for first, last in ((0, 1), (3, 9), (15, 16)):
            assert torch.equal(quantised.linear(x[first:last], weight), few[first:last])
        for first, last in ((0, 17), (3, 70), (100, 130)):
            assert torch.equal(quantised.linear(x[first:last], weight), many[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9, 60])
@pytest.mark.parametrize("name", ["int4", "uint4", "fp4", "fp8", "w8a8"])
def test_experts(device, on_device, name, num_tokens, dtype):
    num_experts, num_out = 8, 72
    step = padded_rows(num_out)
    rows = quantise(numbers(num_experts * step, IN), FORMATS[name])
    bias = numbers(num_experts, step)[:, :num_out].to(dtype)
    with on_device():
        logits = numbers(num_tokens, num_experts).to(device)
        chosen = experts.route(logits, Choice(2)).experts
        pairs = experts.sort_pairs(chosen, num_experts)
        x = numbers(len(pairs.tokens), IN).to(device, dtype)
        found = quantised.experts_linear(
            x, weight_of(rows, device), pairs, bias.to(device), step, num_out
        )
    of_cpu = Pairs(*(each.cpu() for each in pairs))
    weight = weight_of(rows, torch.device("cpu"))
    wanted = cpu.experts_linear(x.cpu().float(), weight, of_cpu, bias.float(), step, num_out)
    assert relative(found, wanted.to(dtype)) < TOLERANCES[dtype]
