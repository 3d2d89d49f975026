"""Where the plan puts tokens."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import AttentionPlan


def test_build():
    plan = AttentionPlan.build([5, 0, 9], [1, 3, 2], [[4, 2], [7], [0, 9, 1, 5]], page_size=4)
    assert plan.cells.tolist() == [2 * 4 + 1, 7 * 4, 7 * 4 + 1, 7 * 4 + 2, 1 * 4 + 1, 1 * 4 + 2]
    assert plan.query_starts.tolist() == [0, 1, 4, 6]
    assert plan.context_lengths.tolist() == [6, 3, 11]
    # The last row's fourth page is not needed yet.
    assert plan.page_table.tolist() == [[4, 2, 0], [7, 0, 0], [0, 9, 1]]
    assert plan.num_rows == 3
    assert plan.cells.dtype == torch.int64
    assert {plan.query_starts.dtype, plan.context_lengths.dtype, plan.page_table.dtype} == {
        torch.int32
    }


def test_too_few_pages_is_our_bug():
    with pytest.raises(AssertionError, match="row 1 has 1 pages and needs 2"):
        AttentionPlan.build([0, 4], [4, 1], [[0], [1]], page_size=4)
