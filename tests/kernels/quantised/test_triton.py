"""The Triton products with quantised weights, run by Triton's interpreter, against the definition;
and compiled for sm_80 and sm_90 without a GPU."""

from __future__ import annotations

from dataclasses import astuple
from itertools import product

import pytest
import torch

from kernels.experts import Pairs, padded_rows
from kernels.experts.reference import sort_pairs
from kernels.quantised import (
    Activations,
    Codes,
    QuantisedRows,
    WeightFormat,
    quantise,
    reference,
)
from kernels.quantised.cpu import experts_linear
from kernels.quantised.weight import QuantisedWeight
from tests.support.pairs import pairwise

FEW, MANY, OUT, IN = 3, 21, 40, 192
DTYPES = [torch.float32, torch.float16]
RATIOS = {torch.float32: 1e-6, torch.float16: 6e-4}
SCALES = ("float32", "float16", "bfloat16")
SIZES = (0, 16, 32, 64, 128)


def form_of(codes: Codes, size: int, scales: str = "float32") -> WeightFormat:
    return WeightFormat(codes, size, has_offsets=codes is Codes.UINT4, scales=scales)


INT4, UINT4, NF4, FP4, FP8 = (
    form_of(codes, size, scales)
    for codes, size, scales in (
        (Codes.INT4, 128, "bfloat16"),
        (Codes.UINT4, 64, "float16"),
        (Codes.NF4, 64, "float32"),
        (Codes.FP4, 32, "bfloat16"),
        (Codes.FP8, 0, "float32"),
    )
)
SMALL = form_of(Codes.INT4, 16, "float16")
W8A8 = WeightFormat(Codes.INT8, activations=Activations.INT8)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def fields_of(form: WeightFormat) -> tuple:
    codes, *rest, activations = astuple(form)
    return (codes.value, *rest, activations.value)


def tensors_of(rows: QuantisedRows) -> list[torch.Tensor | None]:
    return [rows.codes, rows.scales, rows.offsets]


def linear(interpreter, rows: QuantisedRows, *args, **options) -> torch.Tensor:
    return interpreter.call("linear", fields_of(rows.format), tensors_of(rows), *args, **options)


@pairwise(codes=list(Codes), size=SIZES, scales=SCALES, num_rows=(FEW, MANY), dtype=DTYPES)
def test_products(interpreter, assert_close, codes, size, scales, num_rows, dtype):
    form = form_of(codes, size, scales)
    rows, x = quantise(numbers(OUT, IN), form), numbers(num_rows, IN, dtype=dtype)
    bias = numbers(OUT, dtype=dtype)
    found = linear(interpreter, rows, x, bias)
    assert_close("product", reference.linear(x, rows, bias), found, RATIOS[dtype])


@pairwise(
    codes=[Codes.INT4, Codes.NF4, Codes.FP8],
    num_rows=[1, 16, 17],
    in_features=[8, 64, 80, 200],
)
def test_inputs_need_not_fill_a_block(interpreter, assert_close, codes, num_rows, in_features):
    """Behind them there is padding, and behind the last row somebody else's memory."""
    form = WeightFormat(codes, 32, scales="bfloat16")
    rows, x = quantise(numbers(33, in_features), form), numbers(num_rows, in_features).half()
    found = linear(interpreter, rows, x)
    assert_close("product", reference.linear(x, rows), found, RATIOS[torch.float16])


@pytest.mark.parametrize("form", [INT4, UINT4, FP8, W8A8], ids=str)
def test_splits_are_added_up(interpreter, assert_close, form):
    """With the bias, and in fp32."""
    rows, x, bias = quantise(numbers(OUT, 640), form), numbers(4, 640).half(), numbers(OUT).half()
    constants = {"quantised_narrow": {"programs": 12, "row_bytes": 64, "block_n": 16}}
    found = linear(interpreter, rows, x, bias, torch.float32, constants=constants)
    assert_close("product", reference.linear(x, rows, bias, torch.float32), found, 6e-4)
    assert not torch.equal(found, found.half().float())


@pytest.mark.parametrize("form", [SMALL, UINT4, FP8], ids=str)
def test_tiles_of_any_length_make_the_same_numbers(interpreter, form):
    rows = quantise(numbers(OUT, IN), form)
    many = numbers(70, IN).half()
    short, middle, long = (
        linear(interpreter, rows, many, constants=constants)
        for constants in (
            {"quantised_short": {"max_rows": 99}},
            {"quantised_short": {"max_rows": 1}},
            {"quantised_short": {"max_rows": 1}, "quantised_middle": {"max_rows": 1}},
        )
    )
    assert torch.equal(short, middle)
    assert torch.equal(short, long)


@pytest.mark.parametrize("form", [INT4, UINT4, FP8], ids=str)
def test_wide_outputs(interpreter, assert_close, form):
    rows, x = quantise(numbers(OUT, IN), form), numbers(FEW, IN).half()
    found = linear(interpreter, rows, x, constants={"quantised_narrow": {"max_out": 1}})
    assert_close("product", reference.linear(x, rows), found, RATIOS[torch.float16])


@pytest.mark.parametrize("counts", [(1, 16), (17, 40)], ids=["few", "many"])
@pytest.mark.parametrize("form", [FP4, UINT4, W8A8], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(interpreter, form, counts):
    rows, x = quantise(numbers(OUT, IN), form), numbers(counts[1], IN).half()
    every = linear(interpreter, rows, x)
    first = linear(interpreter, rows, x[-counts[0] :])
    assert torch.equal(first, every[-counts[0] :])


@pytest.mark.parametrize("codes", Codes)
@pytest.mark.parametrize("num_rows", [1, 17])
def test_every_code_has_its_value(interpreter, codes, num_rows):
    """Each is multiplied by 1, alone; NaN remains what it is."""
    form = WeightFormat(codes)
    every = torch.arange(len(codes.table), dtype=torch.uint8)[:, None].repeat(1, 64)
    rows = QuantisedRows(form, every, torch.ones(len(every), 1))
    x = torch.zeros(num_rows, 64, dtype=torch.float16)
    x[:, 37] = 1
    values = codes.table.half()
    if codes is Codes.FP8:  # 0 times NaN is NaN: the inputs that are 0 have other codes
        rows.codes[:, :37] = rows.codes[:, 38:] = 0
    found = linear(interpreter, rows, x)
    torch.testing.assert_close(found, values.expand(num_rows, -1), rtol=0, atol=0, equal_nan=True)


def test_no_rows_and_rows_apart(interpreter, assert_close):
    rows = quantise(numbers(OUT, IN), INT4)
    assert linear(interpreter, rows, numbers(0, IN)).shape == (0, OUT)
    x = numbers(FEW, 2 * IN)[:, :IN]
    assert_close("apart", reference.linear(x, rows), linear(interpreter, rows, x), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_rounded_to_int8(interpreter, dtype):
    """A number that is none makes its row so."""
    x = numbers(5, 5000) * torch.tensor([[1e-3], [1.0], [100.0], [0.0], [1.0]])
    x[4, 7] = torch.nan
    x = x.to(dtype)
    codes, scales = interpreter.call("rounded_inputs", x)
    expected = interpreter.call("defined_inputs", x[:4])
    assert torch.equal(codes[:4], expected[0].to(dtype))
    assert torch.equal(scales[:4], expected[1])
    assert codes[4].isnan().any()


EXPERTS, HIDDEN = 5, 72
CLASSES = {
    "short": {},
    "middle": {"quantised_short": {"max_rows": 1}},
    "long": {"quantised_short": {"max_rows": 1}, "quantised_middle": {"max_rows": 1}},
}


def routed(num_tokens: int) -> Pairs:
    """Returns pairs of which one expert has most, and one has none."""
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = torch.stack(
        [torch.randperm(EXPERTS - 1, generator=generator)[:2] for _ in range(num_tokens)]
    )
    chosen[:, 0] = 1
    chosen[:, 1] = torch.where(chosen[:, 1] == 1, 0, chosen[:, 1])
    return sort_pairs(chosen.int(), EXPERTS)


@pairwise(
    form=[SMALL, UINT4, FP4, FP8, W8A8],
    num_tokens=[1, 20],
    has_bias=[False, True],
    name=list(CLASSES),
)
def test_experts(interpreter, assert_close, form, num_tokens, has_bias, name):
    step, pairs = padded_rows(HIDDEN), routed(num_tokens)
    rows = quantise(numbers(EXPERTS * step, IN), form)
    weight = QuantisedWeight.empty(form, len(rows), IN, torch.device("cpu"))
    weight.put_rows(0, rows)
    x = numbers(2 * num_tokens, IN)
    bias = numbers(EXPERTS, step)[:, :HIDDEN] if has_bias else None
    found = interpreter.call(
        *("experts_linear", fields_of(form), tensors_of(rows), x, pairs, bias, step, HIDDEN),
        constants=CLASSES[name],
    )
    expected = experts_linear(x, weight, pairs, bias, step, HIDDEN)
    assert_close("experts", expected, found, 2e-6)


@pytest.mark.parametrize("form", [INT4, FP8])
def test_a_few_steps_launch_whatever_any_launches(interpreter, form):
    """Tiles that begin with pairs or with experts, of three lengths."""
    sizes = interpreter.call("sizes_to_warm_up", fields_of(form), 700, 16, 4, 2)
    assert sizes[0] == 1
    assert len(sizes) == 4
    launched = interpreter.call("num_launched", fields_of(form), sizes, 16, 4)
    assert launched == 4
    every = list(range(1, 701, 3))
    assert interpreter.call("num_launched", fields_of(form), [*sizes, *every], 16, 4) == launched


SHORT = {(Codes.FP8, 80), (Codes.FP8, 90), (Codes.NF4, 80)}
"""The others take a minute; test_sass.py compiles some for sm_90, too."""


@pytest.mark.parametrize(
    ("codes", "capability"),
    [
        pytest.param(*cell, marks=() if cell in SHORT else pytest.mark.long)
        for cell in product(Codes, (80, 90))
    ],
)
def test_they_compile(compiler, codes, capability):
    """For devices with and without conversions of FP8."""
    form = WeightFormat(codes, 64, has_offsets=codes is Codes.UINT4, scales="bfloat16")
    for num_rows in (1, 300):
        found = compiler.call("compile_ptx", capability, fields_of(form), torch.bfloat16, num_rows)
        [ptx] = [text for name, text in found.items() if "rows" in name]
        assert "mma" in ptx
        assert ("e4m3" in ptx) == (codes is Codes.FP8 and capability == 90)
