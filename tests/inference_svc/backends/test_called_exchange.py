"""Operations of a program that leave the exchange to another, such as a process group."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inference_svc.backends.exchange import ExchangeFailed
from inference_svc.backends.native.exchange import CalledExchange, SharedMeeting
from inference_svc.model.description import Rank
from kernels.native.library import Library
from kernels.ranks.reference import sum_ranks
from tests.support.inference.ranks import exchanges, on_ranks
from tests.support.native import native_library


@pytest.fixture(scope="module")
def library() -> Library:
    return native_library()


def spaced(rows: int, size: int, gap: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size + gap).to(dtype)[:, :size]


@given(data=st.data())
def test_sums(library: Library, data: st.DataObject) -> None:
    """The rows behind the count, and what is between rows, stay."""
    count, rows = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 4))
    size, gap = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0, 7]))
    used, dtype = data.draw(st.integers(0, rows)), torch.float32
    terms = [torch.randn(rows, size + gap, dtype=dtype) for _ in range(count)]
    before = [each.clone() for each in terms]
    number, all_of = torch.tensor([used], dtype=torch.int32), exchanges(count)

    def run(rank: int) -> None:
        called = CalledExchange(rank, all_of[rank])
        library.run(called.sum_op(terms[rank][:, :size], number))
        called.check()

    on_ranks(count, run)
    expected = sum_ranks(before)
    for found, first in zip(terms, before, strict=True):
        torch.testing.assert_close(found[:used, :size], expected[:used, :size])
        assert torch.equal(found[used:], first[used:])
        assert torch.equal(found[:, size:], first[:, size:])


@given(data=st.data())
def test_columns(library: Library, data: st.DataObject) -> None:
    """The last rank may have fewer."""
    count, part = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 17))
    last, rows = data.draw(st.integers(1, part)), data.draw(st.integers(1, 3))
    used, gap = data.draw(st.integers(0, rows)), data.draw(st.sampled_from([0, 3]))
    size = part * (count - 1) + last
    whole, all_of = spaced(rows, size, gap, torch.float32), exchanges(count)
    number = torch.tensor([used], dtype=torch.int32)
    found = [torch.full((rows, size + gap), torch.nan) for _ in range(count)]

    def run(rank: int) -> None:
        own = slice(rank * part, min(size, (rank + 1) * part))
        x = found[rank][:, :size]
        x[:, own] = whole[:, own]
        called = CalledExchange(rank, all_of[rank])
        library.run(called.columns_op(x, number, part))
        called.check()

    on_ranks(count, run)
    assert torch.equal(found[0][:used, :size], whole[:used])
    assert found[0][:, size:].isnan().all()
    if used < rows and count > 1:
        assert found[0][used:, part:size].isnan().all()


@given(data=st.data())
def test_rows_that_stages_hand_on(library: Library, data: st.DataObject) -> None:
    """The rows behind the count, and what is between rows, stay."""
    rows, size, gap = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40)), 7
    used, all_of = data.draw(st.integers(1, rows)), exchanges(1, 2)
    number = torch.tensor([used], dtype=torch.int32)
    found = [torch.randn(rows, size + gap) for _ in range(2)]
    before = [each.clone() for each in found]

    def run(stage: int) -> None:
        called = CalledExchange(0, all_of[stage])
        x = found[stage][:, :size]
        op = called.receive_op(x, number, 0) if stage else called.send_op(x, number, 1)
        library.run(op)
        called.check()

    on_ranks(2, run)
    assert torch.equal(found[0], before[0])
    assert torch.equal(found[1][:used, :size], before[0][:used, :size])
    assert torch.equal(found[1][used:], before[1][used:])
    assert torch.equal(found[1][:, size:], before[1][:, size:])


def test_a_stage_may_compute_for_long(library: Library) -> None:
    """Another waits longer for it than ranks of one stage do for each other."""
    meeting = SharedMeeting(2, torch.get_num_threads(), 0.1, 2)
    first, second = meeting.join(Rank(0, 2)), pickle.loads(pickle.dumps(meeting)).join(Rank(1, 2))
    sent, received = torch.ones(3), torch.zeros(3)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(second.receive, received, 0)
        time.sleep(0.5)  # it computes
        first.send(sent, 1)
        waiting.result(60)
    assert torch.equal(sent, received)
    meeting.close()


class Failing:
    """An exchange that another rank has left."""

    name = "left"

    def __init__(self) -> None:
        self.num_calls = 0

    def sum(self, x: Tensor) -> None:
        self.num_calls += 1
        raise ExchangeFailed("closed by peer")

    def side_by_side(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is exchanged behind a failure")

    def sum_stages(self, x: Tensor) -> None:
        raise AssertionError("nothing is exchanged behind a failure")

    def broadcast(self, x: Tensor) -> None:
        raise AssertionError("nothing is exchanged behind a failure")

    def broadcast_stages(self, x: Tensor) -> None:
        raise AssertionError("nothing is exchanged behind a failure")

    def send(self, x: Tensor, stage: int) -> None:
        raise AssertionError("nothing is exchanged behind a failure")

    def receive(self, x: Tensor, stage: int) -> None:
        raise AssertionError("nothing is exchanged behind a failure")


def test_an_error_ends_all_exchanges(library: Library) -> None:
    """The run ends, and all later ones do."""
    failing = Failing()
    called = CalledExchange(0, failing)
    x, number = torch.ones(2, 4), torch.tensor([2], dtype=torch.int32)
    ops = called.sum_op(x, number), called.columns_op(x, number, 2), called.sum_op(x, number)
    called.check()
    for _ in range(2):
        library.run(*ops)
        with pytest.raises(ExchangeFailed, match="closed by peer"):
            called.check()
    assert failing.num_calls == 1
    assert torch.equal(x, torch.ones(2, 4))
