"""Where the plan puts tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import tuning
from kernels.attention import AttentionPlan
from kernels.attention.plan import MAX_SEGMENTS, max_segments, segment_starts

POSITIONS = tuning.constants("segments")["positions"]
PROGRAMS = tuning.constants("decode", head_dim=128)["programs"]


def test_build():
    plan = AttentionPlan.build([5, 0, 9], [1, 3, 2], [[4, 2], [7], [0, 9, 1, 5]], page_size=4)
    assert plan.cells.tolist() == [2 * 4 + 1, 7 * 4, 7 * 4 + 1, 7 * 4 + 2, 1 * 4 + 1, 1 * 4 + 2]
    assert plan.query_starts.tolist() == [0, 1, 4, 6]
    assert plan.context_lengths.tolist() == [6, 3, 11]
    # The last row's fourth page is not needed yet.
    assert plan.page_table.tolist() == [[4, 2, 0], [7, 0, 0], [0, 9, 1]]
    assert plan.num_rows == 3
    assert plan.segment_starts.tolist() == [0, 1, 1, 1]
    assert plan.segment_starts.dtype == torch.int32
    assert plan.cells.dtype == torch.int64
    assert {plan.query_starts.dtype, plan.context_lengths.dtype, plan.page_table.dtype} == {
        torch.int32
    }


def test_too_few_pages_is_our_bug():
    with pytest.raises(AssertionError, match="row 1 has 1 pages and needs 2"):
        AttentionPlan.build([0, 4], [4, 1], [[0], [1]], page_size=4)


rows = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 70]), st.integers(1, 200_000)), max_size=40)


@given(rows)
def test_a_rows_segments_depend_on_its_context_only(rows):
    counts = np.array([count for count, _ in rows], dtype=np.int64)
    contexts = np.array([context for _, context in rows], dtype=np.int64)
    starts = segment_starts(counts, contexts)
    assert starts[0] == 0
    for row, (count, context) in enumerate(rows):
        [_, alone] = segment_starts(np.array([count]), np.array([context]))
        assert starts[row + 1] - starts[row] == alone
        assert alone == (min(-(-context // POSITIONS), MAX_SEGMENTS) if count == 1 else 0)
        assert alone <= max_segments(1, context)


@pytest.mark.parametrize("longest", [8_192, 32_768, 131_072])
def test_one_long_row_delays_no_other(longest):
    """Of 128 rows one is long: the program with most to do has little more than its share. With
    one program for a row and key head it had all of the long row's."""
    contexts, num_kv_heads = np.full(128, 512), 8
    contexts[60] = longest
    starts = segment_starts(np.ones(128, dtype=np.int64), contexts)
    lengths = np.repeat(-(-contexts // np.diff(starts)), np.diff(starts) * num_kv_heads)
    work = np.array([lengths[first::PROGRAMS].sum() for first in range(PROGRAMS)])
    # A program takes whole segments, of which some have one more than others.
    assert work.max() <= work.mean() + 2 * POSITIONS + longest // MAX_SEGMENTS
    assert work.max() <= 2 * work.mean() < longest / 2
