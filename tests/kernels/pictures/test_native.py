"""The native operations of towers against their definitions."""

from __future__ import annotations

import pytest
import torch

from kernels.native.library import Library
from kernels.pictures import reference
from kernels.pictures.native import (
    add_blend_op,
    cut_patches_op,
    load_rows_op,
    merge_patches_op,
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
@pytest.mark.parametrize("size", SIZES)
def test_positions_are_blended(library: Library, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, table = torch.randn(9, size).to(dtype), torch.randn(30, size).to(dtype)
    rows, weights = torch.randint(0, 30, (9, 4)), torch.rand(9, 4)
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
