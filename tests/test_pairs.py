"""tests.support.pairs: the cells of a matrix that `make test-unit` runs."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.pairs import STEP, left_out


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
