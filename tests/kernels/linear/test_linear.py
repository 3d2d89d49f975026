"""The native projection against its definition, for every instruction set."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kernels.linear import PackedLinear, linear, linear_op
from kernels.linear.pack import BLOCK
from kernels.linear.reference import linear as definition

pytestmark = pytest.mark.matrix

DTYPES = [torch.float32, torch.bfloat16]
NUM_TOKENS = [0, 1, 2, 5, 6, 7, 13, 14, 15, 16, 17, 29, 64, 100]
SIZES = [(64, 64), (1, 1), (2, 33), (101, 47), (96, 16), (255, 129)]


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def ratio(dtype: torch.dtype) -> float:
    """What rounding once to `dtype` and summing in another order can cost."""
    return 3e-3 if dtype == torch.bfloat16 else 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size_in", "size_out"), SIZES)
def test_any_size(library, assert_close, dtype, size_in, size_out) -> None:
    weight = numbers(size_out, size_in, dtype=dtype)
    packed = PackedLinear.pack(weight)
    for num_tokens in NUM_TOKENS:
        x = numbers(num_tokens, size_in, dtype=dtype)
        got = linear(library, x, packed)
        if num_tokens:
            assert_close(f"T={num_tokens}", definition(x, weight), got, ratio(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_a_block(library, assert_close, dtype) -> None:
    weight = numbers(70, 2000, dtype=dtype)
    x = numbers(1000, 2000, dtype=dtype)
    got = linear(library, x, PackedLinear.pack(weight))
    assert_close("T=1000", definition(x, weight), got, ratio(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "end"), [(0, 70), (0, 32), (31, 33), (64, 70), (5, 5)])
def test_rows_come_back_as_they_were_put(dtype, start, end) -> None:
    weight = numbers(70, 33, dtype=dtype)
    assert torch.equal(PackedLinear.pack(weight).rows(start, end), weight[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_fp32_out(library, assert_close, dtype) -> None:
    weight, bias = numbers(50, 40, dtype=dtype), numbers(50, dtype=dtype)
    x = numbers(19, 40, dtype=dtype)
    packed = PackedLinear.pack(weight, bias)
    assert packed.num_bytes == 64 * 40 * dtype.itemsize + 50 * 4
    assert_close("own", definition(x, weight, bias), linear(library, x, packed), ratio(dtype))
    got = linear(library, x, packed, torch.float32)
    assert_close("fp32", definition(x, weight, bias, torch.float32), got, 1e-6)
    got = linear(library, x, packed, torch.bfloat16)
    assert_close("bf16", definition(x, weight, bias, torch.bfloat16), got, 3e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(library, dtype) -> None:
    packed = PackedLinear.pack(numbers(80, 300, dtype=dtype))
    x = numbers(40, 300, dtype=dtype)
    alone = torch.cat([linear(library, row, packed) for row in x.split(1)])
    for num_tokens in range(2, 41):
        assert torch.equal(linear(library, x[:num_tokens], packed), alone[:num_tokens])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_many(library, dtype) -> None:
    """Among whole tiles and parts of one, and, with the most inputs, in several blocks of rows.
    Sums in fp32 show more than rounded ones."""
    differ = []
    for size_in in (1, 2, 3, 15, 17, 31, 33, 63, 65, 301, 16385):
        packed = PackedLinear.pack(numbers(40, size_in, dtype=dtype))
        x = numbers(130, size_in, dtype=dtype)
        rows = (0, 15, 16, 31, 32, 49, 63, 64, 99, 129)
        alone = {row: linear(library, x[row : row + 1], packed, torch.float32)[0] for row in rows}
        for num_tokens in (33, 64, 100, 130):
            got = linear(library, x[:num_tokens], packed, torch.float32)
            differ += [
                f"K={size_in}, T={num_tokens}: row {row}"
                for row in rows
                if row < num_tokens and not torch.equal(got[row], alone[row])
            ]
    assert not differ


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_wider_tensors_and_nothing_beside_them(library, assert_close, dtype) -> None:
    weight, num_tokens = numbers(37, 21, dtype=dtype), torch.tensor([5], dtype=torch.int32)
    wide_x = torch.full((8, 64), torch.nan, dtype=dtype)
    x = wide_x[:, 7:28]
    x.copy_(numbers(8, 21, dtype=dtype))
    wide_out = torch.full((8, 100), torch.nan, dtype=dtype)
    out = wide_out[:, 11:48]
    library.run(linear_op(x, PackedLinear.pack(weight), out, num_tokens))
    assert_close("out", definition(x, weight)[:5], out[:5], ratio(dtype))
    out[:5] = torch.nan
    assert wide_out.isnan().all(), "something beside the rows was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(0, 32, 96, 3200), (0, 1, 31, 70, 3137, 3200)], ids=str)
def test_rows_that_are_put_apart(dtype, cuts) -> None:
    """In any order, of any dtype: what is packed of the whole."""
    weight, bias = numbers(3200, 21, dtype=dtype), numbers(3200, dtype=dtype)
    whole = PackedLinear.pack(weight, bias)
    parts = PackedLinear.empty(3200, 21, has_bias=True, dtype=dtype)
    for start, end in reversed(list(pairwise(cuts))):
        parts.put_rows(start, weight[start:end].double())
        parts.put_bias(start, bias[start:end].double())
    assert torch.equal(parts.weights, whole.weights)
    assert parts.bias is not None
    assert whole.bias is not None
    assert torch.equal(parts.bias, whole.bias)


def test_rows_of_another_dtype_are_converted_in_blocks() -> None:
    weight = numbers(16 * BLOCK, 64, dtype=torch.float32)
    packed = PackedLinear.empty(len(weight), 64, has_bias=False, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        packed.put_rows(0, weight)
    taken = max(event.self_cpu_memory_usage for event in profiled.events())
    assert taken <= weight.nbytes / 2 / 16


def test_packing_takes_no_copy_beside_the_packed() -> None:
    weight = numbers(64, 512, dtype=torch.bfloat16)
    packed = torch.zeros(weight.nbytes, dtype=torch.uint8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        PackedLinear.pack(weight, allocate=lambda num_bytes: packed)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profiled.key_averages())
    assert taken < weight.nbytes / 2
