"""LoraPlan.build: who computes what, from rows of slots and lengths."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.lora import BASE_SLOT, LoraGroup, LoraPlan, LoraTable, TableEntry
from kernels.lora.plan import (
    ITEM_ROWS,
    ITEM_TILE,
    ROWS_TOKENS,
    TILE_TOKENS,
    plan_decodes,
    plan_items,
)

MAX_LORAS = 6


@pytest.fixture(scope="module")
def table():
    """Slot s has targets 0 .. s - 1, at rank s + 1; slot 0 has none."""
    table = LoraTable.create(MAX_LORAS, MAX_LORAS, torch.zeros(4096), "cpu")
    for slot in range(MAX_LORAS):
        table.set_row(slot, [TableEntry(target, 0, 2, slot + 1, 8, 8) for target in range(slot)])
    return table


@st.composite
def batches(draw):
    """(slots, lengths) of a batch: rows of one slot are neighbours, in any order of slots."""
    order = draw(st.permutations(range(BASE_SLOT, MAX_LORAS)))
    lengths = st.lists(st.integers(1, 2 * TILE_TOKENS + 2) | st.just(1), max_size=5)
    rows = [(slot, length) for slot in order for length in draw(lengths)]
    return [slot for slot, _ in rows], [length for _, length in rows]


@st.composite
def any_batches(draw):
    """(slots, lengths) of a batch: rows in any order, many of one token."""
    lengths = st.sampled_from([1, 1, 1, 1, 2, TILE_TOKENS + 1])
    rows = draw(st.lists(st.tuples(st.integers(BASE_SLOT, 2), lengths), min_size=1, max_size=70))
    return [slot for slot, _ in rows], [length for _, length in rows]


def token_slots(slots, lengths):
    return [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]


@given(batch=batches())
def test_segments_cover_exactly_the_adapter_tokens(table, batch):
    plan = LoraPlan.build(*batch, table, "cpu")
    expected = token_slots(*batch)
    covered = [BASE_SLOT] * plan.num_tokens
    end = 0
    for segment in plan.segments:
        assert end <= segment.start < segment.end
        covered[segment.start : segment.end] = [segment.slot] * (segment.end - segment.start)
        end = segment.end
    assert covered == expected == plan.token_slots.tolist()
    slots = [segment.slot for segment in plan.segments]
    assert BASE_SLOT not in slots
    assert len(slots) == len(set(slots)), "one segment per slot, as its rows are neighbours"


@given(batch=any_batches())
def test_items_cover_the_same_tokens(table, batch):
    plan = LoraPlan.build(*batch, table, "cpu")
    order = plan.order.tolist()
    assert sorted(order) == list(range(plan.num_tokens))
    covered = [BASE_SLOT] * plan.num_tokens
    for start, num_tokens, slot, kind in plan.items.tolist():
        assert 1 <= num_tokens <= (TILE_TOKENS if kind == ITEM_TILE else ROWS_TOKENS)
        for token in order[start : start + num_tokens]:
            assert covered[token] == BASE_SLOT, "no overlap"
            covered[token] = slot
    assert covered == token_slots(*batch)
    assert plan.has_tiles == (ITEM_TILE in plan.items[:, 3].tolist())


@given(batch=any_batches())
def test_rows_of_one_token_share_items_with_each_other_alone(table, batch):
    plan = LoraPlan.build(*batch, table, "cpu")
    of_rows = Counter(
        slot for slot, length in zip(*batch, strict=True) if length == 1 and slot != BASE_SLOT
    )
    assert plan.num_rows == of_rows.total()
    items = [item for item in plan.items.tolist() if item[3] == ITEM_ROWS]
    tokens = [plan.order[start + i].item() for start, count, *_ in items for i in range(count)]
    starts = [sum(batch[1][:i]) for i in range(len(batch[1]))]
    expected = {
        start
        for start, slot, length in zip(starts, *batch, strict=True)
        if length == 1 and slot != BASE_SLOT
    }
    assert len(tokens) == len(expected)
    assert {*tokens} == expected
    num_items = Counter(slot for _, _, slot, _ in items)
    assert num_items == {slot: -(-n // ROWS_TOKENS) for slot, n in of_rows.items()}


@given(slots=st.lists(st.integers(BASE_SLOT, 3), max_size=90))
def test_decodes_are_planned_as_rows_of_any_length(slots):
    found = plan_decodes(np.array(slots, np.int64))
    wanted = plan_items(np.array(slots, np.int64), np.ones(len(slots), np.int64))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype == np.int32
        assert np.array_equal(one, other)


@given(batch=batches())
def test_host_facts_are_those_of_the_slots_in_use(table, batch):
    plan = LoraPlan.build(*batch, table, "cpu")
    used = max((slot for slot in batch[0]), default=0)
    assert plan.targets == frozenset(range(max(used, 0)))
    assert plan.max_rank == (used + 1 if used > 0 else 0)
    assert plan.has_adapters == (used > 0)
    assert plan.has_group(LoraGroup((0, 5), 8, (0, 8), (8, 8))) == plan.has_adapters
    assert plan.has_group(LoraGroup((4,), 8, (0,), (8,))) == (used > 4)


def test_longer_rows_of_a_slot_share_tiles(table):
    plan = LoraPlan.build([1, 2, 1, 1], [TILE_TOKENS - 1, 1, 3, 1], table, "cpu")
    first = TILE_TOKENS - 1
    assert plan.order.tolist() == [first + 4, *range(first), *range(first + 1, first + 4), first]
    assert plan.items.tolist() == [
        [0, 1, 1, ITEM_ROWS],
        [1, TILE_TOKENS, 1, ITEM_TILE],
        [TILE_TOKENS + 1, 2, 1, ITEM_TILE],
        [TILE_TOKENS + 3, 1, 2, ITEM_ROWS],
    ]
