"""Sums and rows that ranks exchange within a program: ranks of one machine through memory that they
share, and others through a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_svc.backends.exchange import ExchangeFailed, Place, stage_pairs
from inference_svc.host.cpus import usable_cores
from inference_svc.model.description import Rank
from inference_svc.model.sharding.exchange import StagedExchange
from kernels.lora import LoraGroup
from kernels.lora.native import NativeLora
from kernels.native.library import Library, NativeOp, load
from kernels.ranks.called import call_op
from kernels.ranks.memory import RankMemory, create_file, file_bytes
from kernels.ranks.native import (
    broadcast_rows_op,
    hand_rows_op,
    rank_columns_op,
    sum_ranks_op,
)

STAGE_S = 1800.0
"""How long a rank may wait for another stage, which computes meanwhile: a part of a step, which may
take minutes on CPUs. A process that hangs, and a step that does, are noticed sooner by others."""


class ProgramExchange(StagedExchange, Protocol):
    """An exchange, and the operations of a program that exchange with all other ranks, which run
    the same in the same order. They return at once, with anything as their result, when an exchange
    has failed."""

    def sum_op(self, x: Tensor, count: Tensor) -> NativeOp:
        """Builds x[:count] = the sum of all ranks' x[:count].

        Args:
            x: [N, size], float32 or bfloat16, with rows of unit stride that may be apart.
            count: int32 [1], read when the program runs.
        """

    def columns_op(self, x: Tensor, count: Tensor, part_size: int) -> NativeOp:
        """Builds x[:count] = the columns of all ranks side by side, on rank 0; on others they are
        anything. Rank r computes the columns from r * part_size on, `part_size` or as many as there
        are.

        Args:
            x: float32 [N, size], with rows of unit stride that may be apart. It has this rank's
                columns.
            count: int32 [1], read when the program runs.
            part_size: The number of columns of each rank.
        """

    def shrunk_op(self, lora: NativeLora, group: LoraGroup) -> NativeOp:
        """Builds the sums over ranks of a group's products with A; see `NativeLora.sum_op`."""

    def send_op(self, x: Tensor, count: Tensor, stage: int) -> NativeOp:
        """Hands x[:count] to the rank with the same index in another stage, which receives it.

        Args:
            x: [N, size], float32 or bfloat16, with rows of unit stride that may be apart.
            count: int32 [1], read when the program runs.
            stage: The other stage.
        """

    def receive_op(self, x: Tensor, count: Tensor, stage: int) -> NativeOp:
        """Overwrites x[:count] with the values of a `send_op` of another stage, of as many rows of
        this size; see there."""

    def check(self) -> None:
        """Raises ExchangeFailed if a run of operations has not exchanged all of its values."""


class SharedMeeting:
    """A `Meeting` in memory that processes share, of ranks that compute with as many threads. Ranks
    are in groups, each with memory of its own: the ranks of a stage, all ranks, and each two of
    which one hands values on to the other."""

    def __init__(self, count: int, num_threads: int, timeout_s: float, num_stages: int = 1) -> None:
        self._num_threads, self._timeout_s = num_threads, timeout_s
        self._num_stages = num_stages
        num_ranks = count // num_stages
        self._pairs = stage_pairs(num_ranks, num_stages)
        self._groups = _groups(count, num_stages)
        # Of a stage: it waits for others as long as they compute, with the same processors.
        self._spins = num_ranks * num_threads <= usable_cores()
        self._file = create_file(self._groups, num_threads)
        self._opened: SharedExchange | None = self._open(Rank(0, count))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @property
    def files(self) -> tuple[int, ...]:
        return (self._file,)

    def join(self, rank: Rank) -> SharedExchange:
        return self._opened or self._open(rank)

    def fail(self) -> None:
        assert self._opened is not None, "rank 0 fails it"
        self._opened.memory.fail()

    def close(self) -> None:
        os.close(self._file)

    def _open(self, rank: Rank) -> SharedExchange:
        place, library = Place.of(rank, self._num_stages), load()
        assert library is not None, "the backend is supported"
        sends, receives = dict[int, RankMemory](), dict[int, RankMemory]()
        for number, (source, target, index) in enumerate(self._pairs):
            group = self._num_stages + 1 + number
            if (source, index) == (place.stage, place.rank):
                sends[target] = self._memory(group, 0, is_of_stage=False)
            elif (target, index) == (place.stage, place.rank):
                receives[source] = self._memory(group, 1, is_of_stage=False)
        return SharedExchange(
            self._memory(place.stage, place.rank),
            self._memory(self._num_stages, rank.index, is_of_stage=False),
            sends,
            receives,
            library,
        )

    def _memory(self, group: int, rank: int, *, is_of_stage: bool = True) -> RankMemory:
        """Returns the memory of a group, of one stage or of several."""
        return RankMemory(
            self._file,
            self._groups,
            group,
            rank,
            self._num_threads,
            self._timeout_s if is_of_stage else max(self._timeout_s, STAGE_S),
            spins=self._spins and is_of_stage,
        )


def shared_bytes(count: int, num_threads: int, num_stages: int) -> int:
    """Returns the bytes of the memory of a `SharedMeeting`, of all ranks together."""
    return file_bytes(_groups(count, num_stages), num_threads)


def _groups(count: int, num_stages: int) -> tuple[int, ...]:
    """Returns how many ranks each group has: each stage, all ranks, and each two; see
    `stage_pairs`."""
    num_ranks = count // num_stages
    return (*[num_ranks] * num_stages, count, *[2] * len(stage_pairs(num_ranks, num_stages)))


class SharedExchange:
    """An `Exchange` in memory that ranks share, of float32 and bfloat16, and a `ProgramExchange` in
    the same memory: of this stage, of all, and of the other stages by their index."""

    name = "shared memory"

    def __init__(
        self,
        memory: RankMemory,
        of_all: RankMemory,
        sends: Mapping[int, RankMemory],
        receives: Mapping[int, RankMemory],
        library: Library,
    ) -> None:
        self.memory, self._of_all, self._library = memory, of_all, library
        self._sends, self._receives = sends, receives

    @property
    def seconds(self) -> float:
        others = (*self._sends.values(), *self._receives.values())
        return sum(each.seconds for each in (self.memory, self._of_all, *others))

    def sum_op(self, x: Tensor, count: Tensor) -> NativeOp:
        return sum_ranks_op(x, count, self.memory)

    def columns_op(self, x: Tensor, count: Tensor, part_size: int) -> NativeOp:
        return rank_columns_op(x, count, part_size, self.memory, to_all=False)

    def shrunk_op(self, lora: NativeLora, group: LoraGroup) -> NativeOp:
        return lora.sum_op(group, self.memory)

    def send_op(self, x: Tensor, count: Tensor, stage: int) -> NativeOp:
        return hand_rows_op(x, count, self._sends[stage])

    def receive_op(self, x: Tensor, count: Tensor, stage: int) -> NativeOp:
        return hand_rows_op(x, count, self._receives[stage])

    def check(self) -> None:
        if self.memory.fault is not None:
            raise ExchangeFailed(str(self.memory.fault))

    def sum(self, x: Tensor) -> None:
        self._run_row(sum_ranks_op, x, self.memory)

    def sum_stages(self, x: Tensor) -> None:
        self._run_row(sum_ranks_op, x, self._of_all)

    def broadcast(self, x: Tensor) -> None:
        self._run_row(broadcast_rows_op, _as_float(x), self.memory)

    def broadcast_stages(self, x: Tensor) -> None:
        self._run_row(broadcast_rows_op, _as_float(x), self._of_all)

    def send(self, x: Tensor, stage: int) -> None:
        self._run_row(hand_rows_op, _as_float(x), self._sends[stage])

    def receive(self, x: Tensor, stage: int) -> None:
        self._run_row(hand_rows_op, _as_float(x), self._receives[stage])

    def _run_row(
        self, make: Callable[[Tensor, Tensor, RankMemory], NativeOp], x: Tensor, memory: RankMemory
    ) -> None:
        row = x.view(1, -1)
        self._library.run(make(row, _count(row), memory))
        self.check()

    def side_by_side(self, x: Tensor) -> Tensor:
        rank, count, width = self.memory.args.rank, self.memory.args.num_ranks, x.shape[1]
        found = x.new_empty(len(x), count * width, dtype=torch.float32)
        found[:, rank * width : (rank + 1) * width] = x
        self._library.run(rank_columns_op(found, _count(x), width, self.memory, to_all=True))
        self.check()
        return found.to(x.dtype)


class CalledExchange:
    """A `ProgramExchange` that has another exchange compute, in the thread that runs the program,
    while the threads of its team wait. Its first error ends all exchanges."""

    def __init__(self, index: int, exchange: StagedExchange) -> None:
        """`index` is this rank's in its stage."""
        self._index, self._exchange = index, exchange
        self.name = exchange.name
        self._error: BaseException | None = None
        self.sum, self.side_by_side = exchange.sum, exchange.side_by_side
        self.sum_stages = exchange.sum_stages
        self.broadcast, self.broadcast_stages = exchange.broadcast, exchange.broadcast_stages
        self.send, self.receive = exchange.send, exchange.receive

    @property
    def seconds(self) -> float:
        return self._exchange.seconds

    def sum_op(self, x: Tensor, count: Tensor) -> NativeOp:
        def run() -> None:
            rows = x[: int(count)]
            whole = rows.contiguous()
            self._exchange.sum(whole)
            if whole is not rows:
                rows.copy_(whole)

        return self._op(run)

    def columns_op(self, x: Tensor, count: Tensor, part_size: int) -> NativeOp:
        size, first = x.shape[1], self._index * part_size

        def run() -> None:
            rows = x[: int(count)]
            own = rows[:, first : first + part_size]
            # The last rank may have fewer.
            padded = rows.new_zeros(len(rows), part_size)
            padded[:, : own.shape[1]] = own
            rows.copy_(self._exchange.side_by_side(padded)[:, :size])

        return self._op(run)

    def shrunk_op(self, lora: NativeLora, group: LoraGroup) -> NativeOp:
        def run() -> None:
            used = lora.shrunk_of(group)
            whole = used.contiguous()
            if whole.numel():
                self._exchange.sum(whole)
                used.copy_(whole)

        return self._op(run)

    def send_op(self, x: Tensor, count: Tensor, stage: int) -> NativeOp:
        return self._op(lambda: self._exchange.send(x[: int(count)].contiguous(), stage))

    def receive_op(self, x: Tensor, count: Tensor, stage: int) -> NativeOp:
        def run() -> None:
            rows = x[: int(count)]
            whole = rows.contiguous()
            self._exchange.receive(whole, stage)
            if whole is not rows:
                rows.copy_(whole)

        return self._op(run)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _op(self, run: Callable[[], None]) -> NativeOp:
        def run_unless_failed() -> None:
            if self._error is not None:
                return
            try:
                run()
            except BaseException as error:
                self._error = error

        return call_op(run_unless_failed)


def _as_float(x: Tensor) -> Tensor:
    """Returns x, or its bytes as of a type that operations know, which do not change them."""
    return x if x.dtype == torch.bfloat16 else x.view(torch.float32)


def _count(x: Tensor) -> Tensor:
    return torch.tensor([len(x)], dtype=torch.int32)
