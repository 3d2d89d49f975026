"""The native operations against their definitions."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import gather_op, rms_norm_op, swiglu_op
from kernels.elementwise.reference import rms_norm, swiglu
from kernels.native.library import Library

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 16, 101, 256]


def count(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def rows(number: int, size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(number * size)
    return (torch.randn(number, size) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_swiglu(library: Library, dtype: torch.dtype, size: int) -> None:
    gate_up, out = rows(17, 2 * size, dtype, 20), torch.full((17, size), torch.nan, dtype=dtype)
    library.run(swiglu_op(gate_up, out, count(16)))
    torch.testing.assert_close(out[:16], swiglu(gate_up)[:16])
    assert out[16].isnan().all(), "a row beyond the count was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_adds_first(library: Library, dtype: torch.dtype, size: int) -> None:
    hidden, delta, weight = (rows(n, size, dtype, 3) for n in (17, 18, 1))
    delta, out = delta[:17], torch.zeros(17, size, dtype=dtype)
    expected = hidden + delta
    normed = rms_norm(expected, weight[0], 1e-5)
    library.run(rms_norm_op(hidden, delta, weight[0], out, count(17), eps=1e-5))
    assert torch.equal(hidden, expected)
    torch.testing.assert_close(out, normed)
    library.run(rms_norm_op(hidden, None, weight[0], out, count(17), eps=1e-5))
    assert torch.equal(hidden, expected)
    torch.testing.assert_close(out, normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(library: Library, dtype: torch.dtype) -> None:
    source, chosen = rows(50, 33, dtype), torch.tensor([49, 0, 7, 7])
    out = torch.full((4, 33), torch.nan, dtype=dtype)
    library.run(gather_op(source, out, chosen, count(3)))
    assert torch.equal(out[:3], source[chosen[:3]])
    assert out[3].isnan().all()


def test_no_rows_are_no_work(library: Library) -> None:
    out = torch.full((2, 8), torch.nan)
    library.run(swiglu_op(torch.ones(2, 16), out, count(0)))
    assert out.isnan().all()
