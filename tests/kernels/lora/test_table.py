"""LoraTable: a row is one write, at an address that never moves."""

from __future__ import annotations

import pytest
import torch

from kernels.lora import GRANULE_BYTES, LoraTable, TableEntry


@pytest.fixture
def arena():
    return torch.arange(16 * GRANULE_BYTES // 2, dtype=torch.int16).view(torch.bfloat16)


@pytest.fixture
def table(arena):
    return LoraTable.create(4, 3, arena, "cpu", max_rank=8)


def test_a_row_says_where_its_matrices_lie(table):
    table.set_row(2, [TableEntry(1, 3, 5, 2, 10, 20, scale=0.25), TableEntry(2, 7, 9, 4, 8, 8)])
    assert table.a_granules.tolist() == [[0, 0, 0], [0, 0, 0], [0, 3, 7], [0, 0, 0]]
    assert table.b_granules[2].tolist() == [0, 5, 9]
    assert table.b_ranks[2].tolist() == [0, 2, 4]
    assert table.scales[2].tolist() == [0.0, 0.25, 1.0]
    assert table.rows.is_contiguous()


def test_views_share_the_arena(table, arena):
    table.set_row(0, [TableEntry(1, 3, 5, 2, 10, 20, scale=0.25)])
    weights = table.weights(0)[1]
    assert weights.a.shape == (2, 10)
    assert weights.b.shape == (2, 20)
    assert weights.scale == 0.25
    assert weights.a.data_ptr() == arena.data_ptr() + 3 * GRANULE_BYTES
    assert weights.b.data_ptr() == arena.data_ptr() + 5 * GRANULE_BYTES
    assert weights.a_t.data_ptr() == weights.a.data_ptr()


def test_an_embedding_has_one_row_of_a_per_token_id(table):
    table.set_row(0, [TableEntry(0, 0, 1, 3, 40, 16, is_embedding=True)])
    assert table.weights(0)[0].a.shape == (40, 3)


def test_replacing_and_clearing_leave_nothing_behind(table):
    address = table.rows.data_ptr()
    table.set_row(1, [TableEntry(0, 1, 2, 8, 8, 8), TableEntry(2, 3, 4, 8, 8, 8)])
    table.set_row(1, [TableEntry(1, 5, 6, 1, 8, 8)])
    assert table.b_ranks[1].tolist() == [0, 1, 0]
    assert list(table.weights(1)) == [1]
    table.clear_row(1)
    assert not table.rows.any()
    assert not table.weights(1)
    assert table.rows.data_ptr() == address


@pytest.mark.parametrize(
    ("slot", "entry"),
    [
        (4, TableEntry(0, 0, 1, 1, 8, 8)),
        (0, TableEntry(0, 0, 1, 9, 8, 8)),
        (0, TableEntry(0, 0, 1, 0, 8, 8)),
        (0, TableEntry(0, 16, 1, 1, 8, 8)),
        (0, TableEntry(0, 0, 15, 1, 8, 129)),
    ],
    ids=["slot", "rank-above-max", "rank-zero", "a-outside", "b-outside"],
)
def test_a_bad_row_changes_nothing(table, slot, entry):
    table.set_row(0, [TableEntry(1, 5, 6, 1, 8, 8)])
    before = table.rows.clone()
    with pytest.raises(AssertionError):
        table.set_row(slot, [entry])
    assert torch.equal(table.rows, before)
    assert list(table.weights(0)) == [1]
