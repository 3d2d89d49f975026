"""tests.support.pairs: the cells of a matrix that `make test` and `make test-unit` run."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.pairs import STEP, VERY_LARGE, chosen, left_out


def test_a_small_matrix_is_run_whole() -> None:
    assert left_out("tests/test_a.py", STEP - 1) == []
    assert len(left_out("tests/test_a.py", STEP)) == STEP - 1


@pytest.mark.parametrize("num_variants", [2, 3, 4])
def test_each_kernel_is_among_the_chosen(num_variants: int) -> None:
    cells = list(product(range(10), range(num_variants)))
    for file in ("tests/test_a.py", "tests/test_b.py"):
        left = {*left_out(file, len(cells))}
        chosen = [cell for index, cell in enumerate(cells) if index not in left]
        assert len(chosen) == len(cells) // STEP
        assert {variant for _, variant in chosen} == {*range(num_variants)}


@pytest.mark.parametrize(("num_sizes", "share"), [(8, 1 / 2), (40, 1 / 4)])
def test_a_part_of_a_large_matrix_and_of_each_value_is_chosen(num_sizes: int, share: float) -> None:
    axes = (range(num_sizes), ("float32", "bfloat16"), ("native", "torch"))
    cells = {
        "tests/test_a.py::test_it[" + "-".join(map(str, each)) + "]": each
        for each in product(*axes)
    }
    kept = [
        cells[name] for name in chosen({name: [*enumerate(each)] for name, each in cells.items()})
    ]
    assert 0.7 < len(kept) / (share * len(cells)) < 1.6
    for axis in (1, 2):
        for value in axes[axis]:
            found = sum(cell[axis] == value for cell in kept)
            assert 0.5 < found / (share * len(cells) / 2) < 1.7


def test_a_value_that_many_cells_share_is_in_one_at_least() -> None:
    sizes = range(VERY_LARGE)
    cells = {f"test_it[{size}-{kind}]": [size, kind] for size in sizes for kind in "abcdefghij"}
    unlucky = sizes[-1]
    cells = {
        name: values
        for name, values in cells.items()
        if unlucky not in values or name not in chosen(cells)
    }
    assert sum(unlucky in values for values in cells.values()) in range(5, 10)
    shared = {*sizes[:-1], *"abcdefghij"}
    assert shared <= {value for name in chosen(cells) for value in cells[name]}
