"""The native operations against their definitions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.elementwise import (
    add_rows_op,
    clamped_swiglu_op,
    exact_geglu_op,
    gather_op,
    geglu_op,
    gelu_op,
    gelu_tanh_op,
    norm_by_sum_op,
    quick_gelu_op,
    rms_norm_op,
    scale_rows_op,
    silu_op,
    sum_squares_op,
    swiglu_op,
)
from kernels.elementwise.reference import (
    add_rms_norm,
    bound_logits,
    clamped_swiglu,
    exact_geglu,
    geglu,
    norm_by_sum,
    rms_norm,
    swiglu,
)
from kernels.native.library import Library

pytestmark = pytest.mark.matrix

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 16, 101, 256]


def count(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def rows(number: int, size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(number * size)
    return (torch.randn(number, size) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("op", "definition"),
    [(swiglu_op, swiglu), (geglu_op, geglu), (exact_geglu_op, exact_geglu)],
)
def test_gated(library: Library, dtype: torch.dtype, size: int, op: Any, definition: Any) -> None:
    gate_up, out = rows(17, 2 * size, dtype, 20), torch.full((17, size), torch.nan, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    library.run(op(gate, up, out, count(16)))
    torch.testing.assert_close(out[:16], definition(gate, up)[:16])
    assert out[16].isnan().all(), "a row beyond the count was written"


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("op", "definition"),
    [
        (silu_op, F.silu),
        (gelu_op, F.gelu),
        (gelu_tanh_op, gelu_tanh),
        (quick_gelu_op, quick_gelu),
    ],
)
def test_activations(
    library: Library, dtype: torch.dtype, size: int, op: Any, definition: Any
) -> None:
    """Rows may be apart, and the output in place of the input."""
    x, out = rows(17, size, dtype, 5), torch.full((17, size), torch.nan, dtype=dtype)
    library.run(op(x, out, count(16)))
    torch.testing.assert_close(out[:16], definition(x)[:16])
    assert out[16].isnan().all(), "a row beyond the count was written"
    apart, other = spaced(torch.zeros_like(x), GAP), x.clone()
    library.run(op(spaced(x), apart, count(17)), op(other, other, count(16)))
    check_rows(op.__name__, apart, apart)
    assert torch.equal(apart[:16], out[:16])
    assert torch.equal(other[:16], out[:16])


@pytest.mark.parametrize("op", [gelu_op, silu_op])
def test_activations_of_what_is_no_number(library: Library, op: Any) -> None:
    x = torch.tensor([[torch.nan, torch.inf, 0.0, -80.0]])
    library.run(op(x, x, count(1)))
    assert x[0, 0].isnan()
    assert x[0, 1:].tolist() == pytest.approx([torch.inf, 0.0, 0.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_added(library: Library, dtype: torch.dtype, size: int) -> None:
    """One by type, or the first one of all tokens, and one by position; each sum is rounded."""
    x, by_type, table = rows(9, size, dtype), rows(2, size, dtype), rows(12, size, dtype, 3)
    kinds = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1, 1])
    positions, ones = torch.tensor([4, 0, 1, 9, 2, 2, 7, 9, 9]), torch.ones(9, size)
    for kept, types, used in product((by_type, None), (kinds, None), (table, None)):
        expected = x.clone()
        if kept is not None:
            expected += kept[0] if types is None else kept[types]
        if used is not None:
            expected += table[positions + 2]
        found = torch.cat((x, ones.to(dtype)))
        op = add_rows_op(found, kept, types, used, positions, count(8), first_row=2)
        library.run(op)
        assert torch.equal(found[:8], expected[:8])
        assert torch.equal(found[8], x[8]), "a row beyond the count was written"


GAP = 77.0
"""What lies between rows that are written."""


def spaced(x: torch.Tensor, gap: float = torch.nan) -> torch.Tensor:
    """Returns a copy whose rows are apart."""
    return torch.full((len(x), x.shape[1] + 40), gap, dtype=x.dtype)[:, : x.shape[1]].copy_(x)


def check_rows(name: str, dense: torch.Tensor, rows: torch.Tensor) -> None:
    """Checks that rows that are apart have the bits of dense ones, and that nothing between them
    was written."""
    assert torch.equal(dense, rows), name
    whole = rows.as_strided((len(rows), rows.stride(0)), (rows.stride(0), 1))
    assert (whole[:, rows.shape[1] :] == GAP).all(), f"{name}: something was written between rows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_gated_may_be_apart(library: Library, dtype: torch.dtype) -> None:
    for size, (op, options) in product(
        SIZES, ((swiglu_op, {}), (geglu_op, {}), (clamped_swiglu_op, {"alpha": 1.7, "limit": 7.0}))
    ):
        gate, up = rows(17, 2 * size, dtype, 20).chunk(2, dim=1)
        dense = torch.zeros(17, size, dtype=dtype)
        out = spaced(dense, GAP)
        library.run(op(gate, up, dense, count(16), **options))
        library.run(op(spaced(gate), spaced(up), out, count(16), **options))
        check_rows(f"{op.__name__}, {size}", dense, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_norms_may_be_apart(library: Library, dtype: torch.dtype) -> None:
    """These of the addend, and of the result if it is not the sum itself."""
    for size, (is_wide, is_centred), scale in product(
        SIZES, ((False, False), (True, False), (True, True)), (1.0, 0.3)
    ):
        hidden, delta = rows(17, size, dtype, 3), rows(18, size, dtype, 3)[:17]
        weight = rows(1, size, torch.float32 if is_wide else dtype)[0]
        dense = torch.zeros_like(hidden)
        out, other = spaced(dense, GAP), hidden.clone()
        options = {"eps": 1e-5, "is_centred": is_centred, "delta_scale": scale}
        library.run(rms_norm_op(hidden, delta, weight, dense, count(16), **options))
        library.run(rms_norm_op(other, spaced(delta), weight, out, count(16), **options))
        check_rows(f"{size}, {is_wide}, {options}", dense, out)
        assert torch.equal(hidden, other)


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
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("is_centred", "has_bias"), [(False, False), (True, False), (True, True)])
def test_weights_in_float32(
    library: Library, dtype: torch.dtype, size: int, is_centred: bool, has_bias: bool
) -> None:
    """What is added is scaled, and rounded, first; the product is rounded, not the norm."""
    hidden, delta = rows(17, size, dtype, 3) + 1, rows(18, size, dtype, 3)[:17]
    weight, out = rows(1, size, torch.float32)[0], torch.zeros(17, size, dtype=dtype)
    expected = hidden.clone()
    bias = rows(2, size, torch.float32)[1] if has_bias else None
    options = {"is_centred": is_centred, "bias": bias}
    scales = {"delta_scale": 0.3, "sum_scale": 0.7}
    normed = add_rms_norm(expected, delta.clone(), weight, 1e-5, **scales, **options)
    library.run(rms_norm_op(hidden, delta, weight, out, count(17), eps=1e-5, **scales, **options))
    # In fp32 a compiler may multiply and add with one rounding.
    torch.testing.assert_close(hidden, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, normed)
    library.run(rms_norm_op(hidden, None, weight, hidden, count(17), eps=1e-5, **options))
    torch.testing.assert_close(hidden, normed, msg="in place")


def test_an_addition_without_a_norm(library: Library) -> None:
    hidden, delta = rows(5, 33, torch.float32), rows(6, 33, torch.float32)[:5]
    expected, out = hidden + 0.5 * delta, torch.full((5, 33), torch.nan)
    library.run(rms_norm_op(hidden, delta, None, out, count(5), eps=0.0, delta_scale=0.5))
    torch.testing.assert_close(hidden, expected, rtol=1e-6, atol=1e-6)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_rows_are_scaled_and_bounded(
    library: Library, dtype: torch.dtype, softcap: float | None
) -> None:
    x = torch.cat((rows(4, 101, dtype, 30), rows(4, 101, dtype, 1e-3), rows(1, 101, dtype)))
    expected = bound_logits(x.float(), 0.7, softcap).to(dtype)
    untouched = x[8].clone()
    library.run(scale_rows_op(x, count(8), scale=0.7, softcap=softcap))
    torch.testing.assert_close(x[:8], expected[:8])
    assert torch.equal(x[8], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(library: Library, dtype: torch.dtype) -> None:
    source, chosen = rows(50, 33, dtype), torch.tensor([49, 0, 7, 7])
    out = torch.full((4, 33), torch.nan, dtype=dtype)
    library.run(gather_op(source, out, chosen, count(3)))
    assert torch.equal(out[:3], source[chosen[:3]])
    assert out[3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathers_columns(library: Library, dtype: torch.dtype) -> None:
    source, chosen = rows(50, 33, dtype)[:, 11:22], torch.tensor([49, 0, 7])
    out = torch.zeros((3, 11), dtype=dtype)
    library.run(gather_op(source, out, chosen, count(3)))
    assert torch.equal(out, source[chosen])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"is_wide": True}, {"is_centred": True}], ids=str)
def test_each_row_may_have_a_weight(
    library: Library, dtype: torch.dtype, options: dict[str, bool]
) -> None:
    is_wide = bool(options) or dtype is torch.float32
    weight_dtype, is_centred = torch.float32 if is_wide else dtype, "is_centred" in options
    x, weights = rows(12, 40, dtype, 3), rows(12, 40, weight_dtype)
    out, parts = torch.zeros_like(x), torch.zeros_like(x)
    expected = rms_norm(x, weights, 1e-5, is_centred=is_centred)
    each = {"eps": 1e-5, "is_centred": is_centred}
    library.run(rms_norm_op(x, None, weights, out, count(12), **each))
    torch.testing.assert_close(out, expected)
    library.run(
        rms_norm_op(x, None, weights[:4].contiguous(), parts, count(4), rows_per_count=3, **each)
    )
    of_parts = rms_norm(x.view(4, 3, 40), weights[:4], 1e-5, is_centred=is_centred)
    torch.testing.assert_close(parts, of_parts.view(12, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_parts_of_rows(library: Library, dtype: torch.dtype) -> None:
    whole, weight = rows(6, 40, dtype, 3), rows(1, 8, torch.float32)[0]
    parts, untouched = whole.view(-1, 8), whole[5].clone()
    expected = rms_norm(parts[:25], weight, 1e-5)
    library.run(rms_norm_op(parts, None, weight, parts, count(5), eps=1e-5, rows_per_count=5))
    torch.testing.assert_close(parts[:25], expected)
    assert torch.equal(whole[5], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["narrow", "wide", "of rows"])
def test_norms_by_sums_of_ranks(library: Library, dtype: torch.dtype, size: int, kind: str) -> None:
    """Of some columns of rows that are apart; the sums lie in a column, too."""
    x, sums = spaced(rows(17, size, dtype)), torch.full((17, 3), torch.nan)
    weight = rows(17, size, torch.float32 if kind == "wide" else dtype)
    weight = weight if kind == "of rows" else weight[0].contiguous()
    library.run(sum_squares_op(x, sums[:, 1], count(16)))
    torch.testing.assert_close(sums[:16, 1], x[:16].float().square().sum(dim=1))
    assert sums[16].isnan().all()
    others = 3.0
    sums[:16, 1] += others
    before, eps, num_summed = x.clone(), 1e-3, 2 * size
    expected = norm_by_sum(
        x[:16], weight[:16] if kind == "of rows" else weight, eps, sums[:16, 1], num_summed
    )
    library.run(norm_by_sum_op(x, weight, eps, sums[:, 1], count(16), num_summed=num_summed))
    torch.testing.assert_close(x[:16], expected)
    assert torch.equal(x[16], before[16])


def test_no_rows_are_no_work(library: Library) -> None:
    out = torch.full((2, 8), torch.nan)
    library.run(swiglu_op(torch.ones(2, 8), torch.ones(2, 8), out, count(0)))
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(library: Library, dtype: torch.dtype) -> None:
    """Bounds, and exponentials that bound what they are given, let none become a number."""
    gate_up = rows(6, 2 * 40, dtype, 3)
    gate_up[1, 5] = gate_up[2, 45] = torch.nan
    gate, up = gate_up.chunk(2, dim=1)
    gated = (
        (swiglu_op(gate, up, swiglu_out := torch.zeros(6, 40, dtype=dtype), count(6)), swiglu),
        (geglu_op(gate, up, geglu_out := torch.zeros(6, 40, dtype=dtype), count(6)), geglu),
    )
    for (op, definition), out in zip(gated, (swiglu_out, geglu_out), strict=True):
        library.run(op)
        assert torch.equal(out.isnan(), definition(gate, up).isnan())
    clamped = torch.zeros(6, 40, dtype=dtype)
    library.run(clamped_swiglu_op(gate, up, clamped, count(6), alpha=1.702, limit=7.0))
    assert torch.equal(clamped.isnan(), clamped_swiglu(gate, up, 1.702, 7.0).isnan())
    library.run(scale_rows_op(gate_up, count(6), scale=0.7, softcap=5.0))
    assert gate_up.isnan().nonzero().tolist() == [[1, 5], [2, 45]]
