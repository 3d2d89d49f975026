"""tests.support.pairs: the cells of a matrix that `make test` and `make test-unit` run."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.pairs import STEP, is_in_half, left_out


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


def test_about_half_of_a_large_matrix_and_of_each_value_is_chosen() -> None:
    cells = list(product(range(40), ("float32", "bfloat16"), ("native", "torch")))
    names = {cell: "tests/test_a.py::test_it[" + "-".join(map(str, cell)) + "]" for cell in cells}
    chosen = [cell for cell in cells if is_in_half(names[cell])]
    assert 0.4 < len(chosen) / len(cells) < 0.6
    for axis in (1, 2):
        for value in {cell[axis] for cell in cells}:
            assert 0.35 < sum(cell[axis] == value for cell in chosen) / (len(cells) / 2) < 0.65
