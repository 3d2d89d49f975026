"""Exchanges of ranks against their definitions, with a thread for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.native.library import Library
from kernels.ranks.memory import RankFault, RankMemory, create_file
from kernels.ranks.native import (
    broadcast_rows_op,
    hand_rows_op,
    rank_columns_op,
    sum_ranks_op,
)
from kernels.ranks.reference import sum_ranks

PIECE_ITEMS = (64 << 10) // 2
DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def memories(count: int, timeout_s: float = 60.0) -> Iterator[list[RankMemory]]:
    """Yields each rank's view of one memory."""
    num_threads = torch.get_num_threads()
    file = create_file([count], num_threads)
    try:
        yield [RankMemory(file, [count], 0, rank, num_threads, timeout_s) for rank in range(count)]
    finally:
        os.close(file)


def on_all(count: int, run: Callable[[int], None]) -> None:
    """Runs each rank's part at the same time."""
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(run, rank) for rank in range(count)]:
            done.result(60)


def spaced(rows: int, size: int, gap: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size + gap).to(dtype)[:, :size]


@given(data=st.data())
def test_sums(library: Library, data: st.DataObject) -> None:
    """Equal on all ranks, bit by bit, for any number of pieces; the rows behind the count stay."""
    count = data.draw(st.integers(2, 4))
    size = data.draw(st.sampled_from([1, 31, 64, 200, PIECE_ITEMS + 5]))
    rows, gap = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0, 7]))
    used, dtype = data.draw(st.integers(0, rows)), data.draw(st.sampled_from(DTYPES))
    terms = [[spaced(rows, size, gap, dtype) for _ in range(count)] for _ in range(3)]
    before = [[each.clone() for each in one] for one in terms]
    number = torch.tensor([used], dtype=torch.int32)
    with memories(count) as views:

        def run(rank: int) -> None:
            library.run(*(sum_ranks_op(one[rank], number, views[rank]) for one in terms))

        on_all(count, run)
        assert views[0].fault is None
        assert all(view.seconds > 0 for view in views)
    for one, first in zip(terms, before, strict=True):
        expected = sum_ranks(first)
        for rank in range(count):
            assert torch.equal(one[rank][:used], expected[:used])
            assert torch.equal(one[rank][used:], first[rank][used:])


@given(data=st.data())
def test_columns(library: Library, data: st.DataObject) -> None:
    """The last rank may have fewer; only rank 0 has those of others, or all have."""
    count, part = data.draw(st.integers(2, 4)), data.draw(st.sampled_from([1, 16, 37, 20_000]))
    last, rows = data.draw(st.integers(1, part)), data.draw(st.integers(1, 3))
    to_all, gap = data.draw(st.booleans()), data.draw(st.sampled_from([0, 3]))
    size = part * (count - 1) + last
    whole = spaced(rows, size, gap, torch.float32)
    number = torch.tensor([rows], dtype=torch.int32)
    found = [torch.full((rows, size + gap), torch.nan)[:, :size] for _ in range(count)]
    with memories(count) as views:

        def run(rank: int) -> None:
            own = slice(rank * part, (rank + 1) * part)
            found[rank][:, own] = whole[:, own]
            op = rank_columns_op(found[rank], number, part, views[rank], to_all=to_all)
            library.run(op, op)

        on_all(count, run)
        assert views[0].fault is None
    for rank in range(count):
        if to_all or rank == 0:
            assert torch.equal(found[rank], whole)
        else:
            others = torch.cat(
                [found[rank][:, : rank * part], found[rank][:, rank * part + part :]], 1
            )
            assert others.isnan().all()


@given(data=st.data())
def test_rows_that_are_handed_on(library: Library, data: st.DataObject) -> None:
    """From rank to rank, by any number of pieces, beside sums of other groups; the rows behind the
    count stay."""
    size = data.draw(st.sampled_from([1, 31, 200, 3 * PIECE_ITEMS + 5]))
    rows, gap = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0, 7]))
    used, dtype = data.draw(st.integers(0, rows)), data.draw(st.sampled_from(DTYPES))
    times = data.draw(st.integers(1, 4))
    first = [spaced(rows, size, gap, dtype) for _ in range(times)]
    before = [each.clone() for each in first]
    others = [[spaced(rows, size, gap, dtype) for _ in range(times)] for _ in range(2)]
    kept = [[each.clone() for each in one] for one in others]
    terms = [torch.ones(1, 8) for _ in range(3)]
    number, one = (torch.tensor([n], dtype=torch.int32) for n in (used, 1))
    groups, num_threads = [2, 3, 2], torch.get_num_threads()
    file = create_file(groups, num_threads)

    def view(group: int, rank: int) -> RankMemory:
        return RankMemory(file, groups, group, rank, num_threads, 60.0)

    def run(rank: int) -> None:
        every = sum_ranks_op(terms[rank], one, view(1, rank))
        near = view(0, rank) if rank < 2 else view(2, 1)
        own = first if rank == 0 else others[rank - 1]
        ops = [hand_rows_op(each, number, near) for each in own]
        if rank == 1:
            far = view(2, 0)
            onward = [hand_rows_op(each, number, far) for each in own]
            ops = [op for pair in zip(ops, onward, strict=True) for op in pair]
        library.run(*ops, every)

    try:
        on_all(3, run)
        assert view(1, 0).fault is None
    finally:
        os.close(file)
    assert all(torch.equal(each, torch.full((1, 8), 3.0)) for each in terms)
    for found, old in zip(others, kept, strict=True):
        for own, was, sent in zip(found, old, before, strict=True):
            assert torch.equal(own[:used], sent[:used])
            assert torch.equal(own[used:], was[used:])
    assert all(map(torch.equal, first, before))


@given(data=st.data())
def test_rows_of_one_rank(library: Library, data: st.DataObject) -> None:
    """All get the first rank's, bit by bit, between sums of the same group; the rows behind the
    count stay."""
    count = data.draw(st.integers(1, 4))
    size = data.draw(st.sampled_from([1, 31, 200, 3 * PIECE_ITEMS + 5]))
    rows, gap = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0, 7]))
    used, dtype = data.draw(st.integers(0, rows)), data.draw(st.sampled_from(DTYPES))
    found = [[spaced(rows, size, gap, dtype) for _ in range(count)] for _ in range(3)]
    found[0][0][0, 0], found[1][0][0, 0] = -0.0, torch.inf
    before = [[each.clone() for each in one] for one in found]
    terms = [[torch.ones(1, 300) for _ in range(count)] for _ in found]
    number, one_row = (torch.tensor([n], dtype=torch.int32) for n in (used, 1))
    with memories(count) as views:

        def run(rank: int) -> None:
            ops = []
            for rows_of, sums_of in zip(found, terms, strict=True):
                ops.append(broadcast_rows_op(rows_of[rank], number, views[rank]))
                ops.append(sum_ranks_op(sums_of[rank], one_row, views[rank]))
            library.run(*ops)

        on_all(count, run)
        assert views[0].fault is None
    assert all((each == count).all() for one in terms for each in one)
    for one, first in zip(found, before, strict=True):
        for rank in range(count):
            assert one[rank][:used].signbit().equal(first[0][:used].signbit())
            assert torch.equal(one[rank][:used], first[0][:used])
            assert torch.equal(one[rank][used:], first[rank][used:])


def test_rows_that_nobody_takes(library: Library) -> None:
    """The first two pieces have a place."""
    file, count = create_file([2, 2], torch.get_num_threads()), torch.ones(1, dtype=torch.int32)
    sender = RankMemory(file, [2, 2], 1, 0, torch.get_num_threads(), 0.2)
    other_group = RankMemory(file, [2, 2], 0, 0, torch.get_num_threads(), 60.0)
    os.close(file)
    op = hand_rows_op(torch.zeros(1, 1), count, sender)
    library.run(op, op)
    assert sender.fault is None
    library.run(op)
    assert sender.fault is RankFault.TIMEOUT
    sum_alone(library, other_group)  # returns at once
    assert other_group.fault is RankFault.TIMEOUT


def sum_alone(library: Library, memory: RankMemory, size: int = 64) -> None:
    x, count = torch.zeros(1, size), torch.ones(1, dtype=torch.int32)
    library.run(*[sum_ranks_op(x, count, memory)] * 3)


def test_a_rank_that_does_not_come(library: Library) -> None:
    with memories(2, timeout_s=0.2) as (memory, _):
        sum_alone(library, memory)
        assert memory.fault is RankFault.TIMEOUT
        assert str(memory.fault) == "another rank has not taken part in an exchange in time"


def test_a_rank_that_has_ended(library: Library) -> None:
    """Another that waits returns at once, as do all later exchanges."""
    with memories(2) as (memory, other), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(sum_alone, library, memory)
        other.fail()
        waiting.result(30)
        sum_alone(library, memory)
        assert memory.fault is other.fault is RankFault.CLOSED


def test_ranks_that_exchange_different_sizes(library: Library) -> None:
    with memories(2) as views:
        on_all(2, lambda rank: sum_alone(library, views[rank], size=64 + rank))
        assert views[0].fault is RankFault.DISAGREEMENT


def test_memory_of_other_ranks() -> None:
    file = create_file([2], 3)
    with pytest.raises(ValueError, match="3 ranks of 3 threads need"):
        RankMemory(file, [3], 0, 0, 3, 1.0)
    os.close(file)
