"""Native products with quantised weights against their definition, for every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from kernels.experts import reference as experts
from kernels.experts.native import PairsBuffer
from kernels.experts.reference import padded_rows
from kernels.native.library import Library
from kernels.quantised import Activations, Codes, QuantisedRows, WeightFormat, quantise
from kernels.quantised.formats import CHUNK_INPUTS
from kernels.quantised.native import (
    INT8_CHUNK,
    Int8Inputs,
    linear,
    quantised_experts_ops,
    quantised_ops,
)
from kernels.quantised.pack import BLOCK_CODES, PackedQuantised, packed_bytes
from kernels.quantised.reference import int8_inputs
from kernels.quantised.reference import linear as definition
from tests.support.examples import examples
from tests.support.native import native_library, variants_here

pytestmark = pytest.mark.matrix

DTYPES = [torch.float32, torch.bfloat16]
SCALES = ("float32", "bfloat16", "float16")
GROUPS = (0, 16, 32, 64, 128, 192, 20)
SIZES = [(33, 33), (100, 515), (64, 256), (70, 1025), (1, 600)]
MOST_ROWS = 200
EXPERTS = 5
W8A8 = WeightFormat(Codes.INT8, activations=Activations.INT8)
WHOLE = (Codes.INT4, Codes.UINT4, Codes.INT8)
"""Codes whose values are whole numbers."""
WHOLE_BITS, WIDEST_WHOLE = 15, 2**17 - 8
"""The bits of an input in whole numbers without its sign, and the most inputs of a row of them."""
UNIT = 2.0**-24
"""The most by which rounding to fp32 changes a number, as a share of it."""


def generator(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(seeds))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(*shape)).to(dtype)


def random_rows(num_rows: int, in_features: int, form: WeightFormat) -> QuantisedRows:
    """Returns rows of any codes but NaN."""
    random = generator(num_rows, in_features)
    shape = (num_rows, in_features)
    codes = torch.randint(0, 2**form.codes.num_bits, shape, dtype=torch.uint8, generator=random)
    codes[form.codes.table[codes.int()].isnan()] = 1
    groups = (num_rows, form.num_groups(in_features))
    scales = (torch.rand(groups, generator=random) + 0.1).to(form.scale_dtype)
    offsets = torch.randn(groups, generator=random).to(form.scale_dtype)
    return QuantisedRows(form, codes, scales, offsets if form.has_offsets else None)


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    codes, scales = int8_inputs(x)
    return codes.float() * scales[:, None]


def chunks(in_features: int, form: WeightFormat) -> Iterator[slice]:
    """Yields the inputs of each chunk: up to CHUNK_INPUTS of one group."""
    group = form.group_size or in_features
    for start in range(0, in_features, group):
        end = min(start + group, in_features)
        for first in range(start, end, CHUNK_INPUTS):
            yield slice(first, min(first + CHUNK_INPUTS, end))


def has_whole_inputs(library: Library, x: torch.Tensor, form: WeightFormat) -> bool:
    """Whether AVX2 multiplies these inputs and codes as integers."""
    is_exact = form.activations is Activations.EXACT and x.dtype == torch.bfloat16
    is_whole = is_exact and form.codes in WHOLE and x.shape[1] <= WIDEST_WHOLE
    return is_whole and library.variant == "avx2"


def as_multiplied(library: Library, x: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """Returns inputs [T, in] as a library multiplies codes by them, in double precision. Whole
    numbers have the last bit of their chunk's largest input; the other libraries round nothing."""
    exact = x.double()
    if not has_whole_inputs(library, x, form):
        return exact
    rounded = exact.clone()
    for part in chunks(x.shape[1], form):
        _, exponents = exact[:, part].abs().amax(1, keepdim=True).frexp()  # above the largest
        last_bits = torch.exp2((exponents - WHOLE_BITS).double())
        rounded[:, part] = (exact[:, part] / last_bits).round() * last_bits
    return rounded


def exact_product(
    library: Library, x: torch.Tensor, rows: QuantisedRows, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x @ W^T + bias in double precision, with inputs as a library multiplies them. Offsets
    are multiplied by sums of the inputs as they are."""
    form = replace(rows.format, has_offsets=False)
    products = QuantisedRows(form, rows.codes, rows.scales).dequantise().double()
    offsets = rows.dequantise().double() - products
    out = as_multiplied(library, x, rows.format) @ products.T + x.double() @ offsets.T
    return out if bias is None else out + bias.double()


def ratio(dtype: torch.dtype) -> float:
    """What rounding inputs' products and the result costs: in bf16, of NF4's values too."""
    return 4e-3 if dtype == torch.bfloat16 else 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", Codes, ids=lambda codes: codes.value)
def test_any_format_and_size_and_a_row_alone_as_in_any_batch(
    library: Library, assert_close, codes: Codes, dtype: torch.dtype
) -> None:
    sizes = cycle(SIZES)
    for group_size, has_offsets, scales in product(GROUPS, (False, True), SCALES):
        form = WeightFormat(codes, group_size, has_offsets, scales)
        size_out, size_in = next(sizes)
        rows = random_rows(size_out, size_in, form)
        packed = PackedQuantised.pack(rows, dtype=dtype)
        x = numbers(MOST_ROWS, size_in, dtype=dtype)
        got = linear(library, x, packed)
        assert_close(f"{form}, {size_out}", definition(x, rows), got, ratio(dtype))
        for count in (1, 2, 5, 13, 40):
            assert torch.equal(linear(library, x[:count], packed), got[:count]), (form, count)
        assert torch.equal(linear(library, x[-1:], packed), got[-1:]), form


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", [Codes.UINT4, Codes.INT8], ids=lambda codes: codes.value)
def test_offsets_change_no_bit_of_a_row_among_many(
    library: Library, codes: Codes, dtype: torch.dtype
) -> None:
    """Also where groups are so many that their sums of inputs are kept of fewer rows. Inputs of
    many sizes make every sum round."""
    differ = []
    for group_size, size_in in ((16, 4100), (32, 1100), (128, 1100), (0, 1100)):
        form = WeightFormat(codes, group_size, has_offsets=True)
        packed = PackedQuantised.pack(random_rows(40, size_in, form), dtype=dtype)
        x = (numbers(100, size_in) * torch.exp2(6 * numbers(size_in))).to(dtype)
        alone = {
            row: linear(library, x[row : row + 1], packed, torch.float32)[0]
            for row in (0, 31, 32, 49, 99)
        }
        for count in (33, 64, 100):
            got = linear(library, x[:count], packed, torch.float32)
            differ += [
                f"group {group_size}, {count} rows: row {row}"
                for row, wanted in alone.items()
                if row < count and not torch.equal(got[row], wanted)
            ]
    assert not differ


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", Codes, ids=lambda codes: codes.value)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_every_code_has_its_value(
    library: Library, codes: Codes, dtype: torch.dtype, num_rows: int
) -> None:
    """Small ones of FP8, too; NF4's may be rounded to bf16."""
    values = codes.table[codes.table.isfinite()]
    all_codes = codes.table.isfinite().nonzero().to(torch.uint8)
    rows = QuantisedRows(WeightFormat(codes, 8), all_codes, torch.full((len(values), 1), 0.5))
    packed = PackedQuantised.pack(rows, dtype=dtype)
    [got] = linear(library, torch.ones(num_rows, 1, dtype=dtype), packed, torch.float32)[-1:] * 2
    assert torch.equal(got, values) or torch.equal(got, values.to(dtype).float())


@pytest.mark.parametrize("form", [WeightFormat(Codes.UINT4, 32, has_offsets=True), W8A8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_wider_tensors_and_nothing_beside_them(
    library: Library, assert_close, dtype: torch.dtype, form: WeightFormat
) -> None:
    rows, bias = random_rows(37, 77, form), numbers(37, dtype=dtype)
    packed = PackedQuantised.pack(rows, bias, dtype=dtype)
    wide_x = torch.full((8, 100), torch.nan, dtype=dtype)
    x = wide_x[:, 7:84]
    x.copy_(numbers(8, 77, dtype=dtype))
    wide_out = torch.full((8, 100), torch.nan)
    out, count = wide_out[:, 11:48], torch.tensor([5], dtype=torch.int32)
    inputs = Int8Inputs.allocate(8, 77, form)
    library.run(*quantised_ops(x, packed, out, count, inputs))
    inputs_of_codes = x if form.activations is Activations.EXACT else rounded_to_int8(x)
    expected = exact_product(library, inputs_of_codes, rows, bias)[:5]
    assert_close("out", expected.float(), out[:5], 2e-6)
    out[:5] = torch.nan
    assert wide_out.isnan().all(), "something beside the rows was written"


@pytest.mark.slow
@pytest.mark.parametrize("codes", WHOLE, ids=lambda codes: codes.value)
def test_inputs_in_bf16_count_to_the_last_bits_of_their_largest(
    library: Library, codes: Codes
) -> None:
    """Inputs of all sizes in one chunk, in rows that are few and many, wide and too wide for whole
    numbers: results differ from exact ones by the roundings of sums alone."""
    wrong = []
    for size_in, group_size in (
        (300, 32),
        (515, 0),
        (400, 192),
        (2**17 - 8, 128),
        (2**17 + 8, 128),
    ):
        form = WeightFormat(codes, group_size, has_offsets=codes is Codes.UINT4)
        rows = random_rows(33, size_in, form)
        packed = PackedQuantised.pack(rows, dtype=torch.bfloat16)
        count = 40 if size_in < 1000 else 2
        x = (numbers(count, size_in) * torch.exp2(12 * numbers(1, size_in))).bfloat16()
        x[0] = x[0] * 2.0**-60
        x[1, : size_in // 2] = 0
        got = linear(library, x, packed, torch.float32).double()
        is_whole = has_whole_inputs(library, x, form)
        num_sums = sum(1 for _ in chunks(size_in, form)) if is_whole else size_in
        # A sum rounds twice or, with an offset, four times: four deviations of as many roundings.
        most = 4 * math.sqrt(4 * num_sums) * UNIT * magnitudes(x, rows)
        error = (got - exact_product(library, x, rows)).abs()
        wrong += [(size_in, row) for row in range(count) if (error[row] > most[row]).any()]
    assert not wrong


def magnitudes(x: torch.Tensor, rows: QuantisedRows) -> torch.Tensor:
    """Returns the sums of the magnitudes of everything that a product adds, [T, out]."""
    form = replace(rows.format, has_offsets=False)
    products = QuantisedRows(form, rows.codes, rows.scales).dequantise()
    offsets = rows.dequantise() - products
    return x.double().abs() @ (products.abs() + offsets.abs()).double().T


@pytest.mark.parametrize("codes", WHOLE, ids=lambda codes: codes.value)
def test_rows_of_zeros_and_of_tiny_inputs(library: Library, codes: Codes) -> None:
    """The smallest inputs of bf16 count for nothing, and 0 gives 0."""
    form = WeightFormat(codes, 32, has_offsets=True)
    packed = PackedQuantised.pack(random_rows(40, 100, form), dtype=torch.bfloat16)
    x = torch.zeros(9, 100, dtype=torch.bfloat16)
    x[1], x[2, ::2], x[3, 50] = 2.0**-133, 2.0**-126, -(2.0**-120)
    got = linear(library, x, packed, torch.float32)
    assert (got[0] == 0).all()
    assert (got[4:] == 0).all()
    assert (got.abs() < 2.0**-100).all()


@pytest.mark.parametrize("codes", [Codes.UINT4, Codes.INT8], ids=lambda codes: codes.value)
@pytest.mark.parametrize("group_size", [0, 4, 16, 192])
def test_rows_have_as_many_inputs_as_is_said(
    library: Library, assert_close, codes: Codes, group_size: int
) -> None:
    form = WeightFormat(codes, group_size, has_offsets=True)
    most = form.max_inputs
    x, rows = numbers(2, most, dtype=torch.bfloat16), random_rows(1, most, form)
    got = linear(library, x, PackedQuantised.pack(rows, dtype=torch.bfloat16), torch.float32)
    most_apart = math.sqrt(4 * sum(1 for _ in chunks(most, form))) * UNIT
    assert_close(f"{form}", exact_product(library, x, rows).float(), got, most_apart)
    with pytest.raises(AssertionError):
        PackedQuantised.empty(1, most + 1, has_bias=False, dtype=torch.float32, form=form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size_in", [1, 33, 1024, INT8_CHUNK])
def test_products_of_int8_are_whole_numbers(
    library: Library, dtype: torch.dtype, size_in: int
) -> None:
    """The same bits with every instruction set."""
    rows = random_rows(65, size_in, W8A8)
    packed = PackedQuantised.pack(rows, dtype=dtype)
    x = numbers(MOST_ROWS, size_in, dtype=dtype)
    x[3], x[4] = 0, 1e-30
    codes, scales = int8_inputs(x)
    sums = (codes.double() @ rows.codes.view(torch.int8).double().T).float()
    expected = scales[:, None] * (rows.scales.T * sums)
    for count in (1, 7, 8, 40, MOST_ROWS):
        assert torch.equal(linear(library, x[:count], packed, torch.float32), expected[:count])


@pytest.mark.parametrize("group_size", [0, 64, 20])
def test_products_of_int8_in_groups_and_of_many_inputs(
    library: Library, assert_close, group_size: int
) -> None:
    form = WeightFormat(Codes.INT8, group_size, group_size == 64, "bfloat16", Activations.INT8)
    size_in = 2 * INT8_CHUNK + 5
    rows = random_rows(40, size_in, form)
    packed = PackedQuantised.pack(rows, dtype=torch.float32)
    x = numbers(9, size_in)
    got = linear(library, x, packed)
    assert_close("int8", definition(x, rows), got, 2e-6)
    assert torch.equal(linear(library, x[5:6], packed), got[5:6])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_int8_have_the_same_bits_with_all_instructions(dtype: torch.dtype) -> None:
    """And alone, where no tiles are used, as among many."""
    libraries = [native_library(variant) for variant in variants_here()]
    differ = []
    for group_size, has_offsets in product((0, 16, 32, 128), (False, True)):
        form = WeightFormat(Codes.INT8, group_size, has_offsets, activations=Activations.INT8)
        size_in = 700 if group_size else INT8_CHUNK + 77
        packed = PackedQuantised.pack(random_rows(40, size_in, form), dtype=dtype)
        x = numbers(70, size_in, dtype=dtype)
        wanted = linear(libraries[-1], x, packed, torch.float32)
        differ += [
            f"{library.variant}, group {group_size}, offsets {has_offsets}: {count} rows"
            for library in libraries
            for count in (1, 2, 3, 33, 70)
            if not torch.equal(linear(library, x[-count:], packed, torch.float32), wanted[-count:])
        ]
    assert not differ


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", [WeightFormat(Codes.INT4, 32), W8A8], ids=str)
def test_a_row_that_is_not_finite_spoils_itself_only(
    library: Library, form: WeightFormat, value: float, dtype: torch.dtype
) -> None:
    packed = PackedQuantised.pack(random_rows(33, 64, form), dtype=dtype)
    x = numbers(20, 64, dtype=dtype)
    expected = linear(library, x, packed)
    x[4, 9] = value
    got = linear(library, x, packed)
    assert not got[4].isfinite().any()
    others = [row for row in range(20) if row != 4]
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("group_size", [0, 32])
def test_a_code_that_is_nan_spoils_its_output_only(library: Library, group_size: int) -> None:
    rows = random_rows(33, 64, WeightFormat(Codes.FP8, group_size))
    x = numbers(20, 64)
    expected = linear(library, x, PackedQuantised.pack(rows, dtype=torch.float32))
    rows.codes[7, 40] = 0xFF
    got = linear(library, x, PackedQuantised.pack(rows, dtype=torch.float32))
    assert got[:, 7].isnan().all()
    others = [output for output in range(33) if output != 7]
    assert torch.equal(got[:, others], expected[:, others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "form",
    [WeightFormat(Codes.FP4, 32), WeightFormat(Codes.UINT4, 32, has_offsets=True), W8A8],
    ids=str,
)
@pytest.mark.parametrize("size_out", [64, 33])
def test_experts(
    library: Library, assert_close, dtype: torch.dtype, form: WeightFormat, size_out: int
) -> None:
    """One of which has many rows, and one none."""
    size_in, step = 77, padded_rows(size_out)
    weights = [random_rows(size_out + expert, size_in, form)[expert:] for expert in range(EXPERTS)]
    bias = numbers(EXPERTS, size_out, dtype=dtype)
    packed = PackedQuantised.empty(EXPERTS * step, size_in, has_bias=True, dtype=dtype, form=form)
    for expert, rows in enumerate(weights):
        packed.put_rows(expert * step, rows)
        packed.put_bias(expert * step, bias[expert])
    routing = PairsBuffer.allocate(100, EXPERTS, 1)
    routing.pairs.starts.copy_(torch.tensor([0, 1, 41, 41, 53, 60]))
    routing.num_pairs.fill_(60)
    x = numbers(100, size_in, dtype=dtype)
    out = torch.full((100, size_out), torch.nan, dtype=dtype)
    inputs = Int8Inputs.allocate(100, size_in, form)
    library.run(*quantised_experts_ops(x, packed, out, routing, inputs))
    assert out[60:].isnan().all()
    wide, plain = x[:60].float(), torch.stack([rows.dequantise() for rows in weights])
    if form.activations is Activations.INT8:
        wide = rounded_to_int8(x[:60])
    expected = experts.experts_linear(wide, plain, routing.pairs, bias.float()).to(dtype)
    assert_close("experts", expected, out[:60], ratio(dtype))


FORMS = st.builds(
    WeightFormat,
    st.sampled_from(Codes),
    st.sampled_from(GROUPS),
    st.booleans(),
    st.sampled_from(SCALES),
) | st.builds(
    WeightFormat,
    st.just(Codes.INT8),
    st.sampled_from(GROUPS),
    st.booleans(),
    st.sampled_from(SCALES),
    st.just(Activations.INT8),
)


@settings(max_examples=examples(150))
@given(FORMS, st.integers(1, 100), st.integers(1, 300), st.data())
def test_rows_come_back_as_they_were_put(
    form: WeightFormat, size_out: int, size_in: int, data: st.DataObject
) -> None:
    rows = random_rows(size_out, size_in, form)
    packed = PackedQuantised.empty(
        size_out, size_in, has_bias=False, dtype=torch.float32, form=form
    )
    assert packed.num_bytes == packed_bytes(size_out, size_in, form)
    cut = data.draw(st.integers(0, size_out))
    packed.put_rows(cut, rows[cut:])
    packed.put_rows(0, rows[:cut])
    start = data.draw(st.integers(0, size_out))
    end = data.draw(st.integers(start, size_out))
    got, expected = packed.quantised_rows(start, end), rows[start:end]
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scales, expected.scales)
    if expected.offsets is not None:
        assert got.offsets is not None
        assert torch.equal(got.offsets, expected.offsets)
    assert torch.equal(packed.rows(start, end), expected.dequantise())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_rows_are_quantised_in_blocks(dtype: torch.dtype) -> None:
    form = WeightFormat(Codes.NF4, 64)
    weight = numbers(8 * BLOCK_CODES // 512 + 3, 512, dtype=dtype)
    packed = PackedQuantised.empty(*weight.shape, has_bias=False, dtype=dtype, form=form)
    packed.put_rows(5, weight[5:40])
    packed.put_rows(0, weight[:5])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        packed.put_rows(40, weight[40:])
    expected = quantise(weight, form)
    assert torch.equal(packed.quantised_rows(0, len(weight)).codes, expected.codes)
    assert torch.equal(packed.rows(0, len(weight)), expected.dequantise().to(dtype))
    taken = max(event.self_cpu_memory_usage for event in profiled.events())
    assert taken <= 8 * BLOCK_CODES, "of the nearest codes' search, in 64 bits"
