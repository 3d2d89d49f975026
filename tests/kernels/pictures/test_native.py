"""The native operations of towers against their definitions."""

from __future__ import annotations

import pytest
import torch

from kernels.native.library import Library
from kernels.pictures import reference
from kernels.pictures.native import (
    add_blend_op,
    arrange_heads_op,
    clip_op,
    copy_rows_op,
    cut_patches_op,
    load_rows_op,
    merge_patches_op,
    read_patches_op,
    standardise_op,
    store_rows_op,
)
from kernels.pictures.reference import Merging

pytestmark = pytest.mark.matrix

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 16, 101]


def count(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


@pytest.mark.parametrize(("height", "width", "side"), [(8, 12, 4), (9, 14, 3), (2, 3, 1)])
def test_patches_are_cut(library: Library, height: int, width: int, side: int) -> None:
    """In any order; the last pixels may belong to no patch, and bytes are numbers bit for bit."""
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
    values = torch.randn(3, 256)
    places = torch.cartesian_prod(torch.arange(height // side), torch.arange(width // side))
    rows, columns = (each.contiguous() for each in places[torch.randperm(len(places))].t())
    out = torch.full((len(places), 3 * side * side), torch.nan)
    op = cut_patches_op(values, rows, columns, out, count(len(places) - 1), side=side)
    op.args.pixels, op.args.width = pixels.data_ptr(), width
    library.run(op)
    wanted = reference.cut_patches(pixels, values, rows, columns, side).flatten(1)
    for patch, row, column in zip(wanted, rows.tolist(), columns.tolist(), strict=True):
        own = pixels[row * side :, column * side :][:side, :side].long()
        assert torch.equal(patch.view(3, side, side)[1], values[1][own[:, :, 1]])
    assert torch.equal(out[:-1], wanted[:-1])
    assert out[-1].isnan().all(), "a patch beyond the count was written"


@pytest.mark.parametrize("dtype", DTYPES)
def test_patches_are_read_pixel_by_pixel(library: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (8, 12, 3), dtype=torch.uint8)
    values, (rows, columns) = torch.randn(3, 256), torch.randint(0, 2, (2, 6))
    out = torch.full((6, 3 * 16), torch.nan, dtype=dtype)
    op = read_patches_op(values, rows, columns, out, count(5), side=4)
    op.args.pixels, op.args.width = pixels.data_ptr(), pixels.shape[1]
    library.run(op)
    wanted = reference.by_pixel(reference.cut_patches(pixels, values, rows, columns, 4), dtype)
    assert torch.equal(out[:5], wanted[:5])
    assert out[5].isnan().all(), "a patch beyond the count was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blended", [1, 2, 4])
def test_positions_are_blended(
    library: Library, blended: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    x, table = torch.randn(9, size).to(dtype), torch.randn(30, size).to(dtype)
    rows, weights = torch.randint(0, 30, (9, blended)), torch.rand(9, blended)
    wanted = x.clone()
    reference.add_blend(wanted[:8], table, rows[:8], weights[:8])
    library.run(add_blend_op(x, table, rows, weights, count(8)))
    torch.testing.assert_close(x, wanted)
    assert torch.equal(x[8], wanted[8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("merging", Merging)
def test_patches_become_cells(
    library: Library, merging: Merging, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    x = torch.randn(5 * 4, size).to(dtype)
    wanted = reference.merge_patches(x, 4, merging)
    out = torch.full_like(wanted, torch.nan)
    library.run(merge_patches_op(x, out, count(4), patches=4, merging=merging))
    torch.testing.assert_close(out[:4], wanted[:4])
    assert out[4].isnan().all(), "a cell beyond the count was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values_are_clipped(library: Library, size: int, dtype: torch.dtype) -> None:
    """Rows that are apart, to others or in place; NaN stays, so that a fault shows."""
    torch.manual_seed(size)
    x, out = (torch.randn(4, size + 3).to(dtype)[:, :size] for _ in range(2))
    x[1, 0], before = torch.nan, out.clone()
    bounds = {"least": -0.5, "most": 0.3}
    wanted = reference.clip(x, *map(torch.tensor, bounds.values()))
    library.run(clip_op(x, out, count(3), **bounds))
    torch.testing.assert_close(out[:3], wanted[:3], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out[3], before[3])
    library.run(clip_op(x, x, count(4), **bounds))
    torch.testing.assert_close(x, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 64, 72, 100])
@pytest.mark.parametrize("quarters", [None, (2, 0, 3, 1)])
@pytest.mark.parametrize("is_own", [False, True])
def test_heads_are_normed_and_arranged(
    library: Library,
    is_own: bool,
    quarters: tuple[int, ...] | None,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """With one weight for all tokens, or, of queries and keys, with each token's own."""
    torch.manual_seed(head_dim)
    size = 3 * 2 * head_dim
    qkv = torch.randn(5, size + 8).to(dtype)[:, :size]
    shape = (5, head_dim) if is_own else (head_dim,)
    weights = torch.randn(shape), torch.randn(shape), torch.randn(head_dim)
    wanted = qkv.clone()
    owned = [each[:4] if each.dim() == 2 else each for each in weights]
    reference.arrange_heads(wanted[:4], owned, 1e-6, quarters)
    values = {"head_dim": head_dim, "eps": 1e-6, "quarters": quarters}
    library.run(arrange_heads_op(qkv, weights, count(4), **values))
    torch.testing.assert_close(qkv, wanted)
    assert torch.equal(qkv[4], wanted[4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("has_factors", [False, True])
def test_cells_are_standardised(
    library: Library, has_factors: bool, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    x = torch.randn(5, size).to(dtype)
    bias, factor = torch.randn(2, size).unbind() if has_factors else (None, None)
    wanted = x.clone()
    wanted[:4] = reference.standardise(x[:4], 5.5, bias, factor)
    library.run(standardise_op(x, count(4), scale=5.5, bias=bias, factor=factor))
    torch.testing.assert_close(x, wanted)
    assert torch.equal(x[4], wanted[4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_copied_between_others(library: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, target = torch.randn(4, 7).to(dtype)[:, 2:5], torch.zeros(4, 9, dtype=dtype)
    library.run(copy_rows_op(source, target[:, 5:8], count(3)))
    assert torch.equal(target[:3, 5:8], source[:3])
    target[:3, 5:8] = 0
    assert not target.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_loaded_and_stored(library: Library, dtype: torch.dtype) -> None:
    """Rows that are apart; nothing between them, and nothing beyond the count."""
    torch.manual_seed(0)
    local, whole = torch.zeros(4, 10, dtype=dtype), torch.randn(9, 10).to(dtype)
    before = whole.clone()
    load = load_rows_op(local[:, :7], count(3))
    load.args.source = whole[2:].data_ptr()
    library.run(load)
    assert torch.equal(local[:3, :7], whole[2:5, :7])
    assert not local[3].any()
    assert not local[:, 7:].any()
    local.fill_(1)
    store = store_rows_op(local[:, :7], count(3))
    store.args.target = whole[4:].data_ptr()
    library.run(store)
    before[4:7, :7] = 1
    assert torch.equal(whole, before)
