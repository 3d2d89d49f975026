"""Sums and rows that ranks exchange within a program: ranks of one machine through memory that they
share, and others through a process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_svc.backends.exchange import ExchangeFailed
from inference_svc.host.cpus import usable_cores
from inference_svc.model.description import Rank
from inference_svc.model.sharding.exchange import Exchange
from kernels.lora import LoraGroup
from kernels.lora.native import NativeLora
from kernels.native.library import Library, NativeOp, load
from kernels.ranks.called import call_op
from kernels.ranks.memory import RankMemory, create_file
from kernels.ranks.native import rank_columns_op, sum_ranks_op


class ProgramExchange(Exchange, Protocol):
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

    def check(self) -> None:
        """Raises ExchangeFailed if a run of operations has not exchanged all of its values."""


class SharedMeeting:
    """A `Meeting` in memory that processes share, of ranks that compute with as many threads."""

    def __init__(self, count: int, num_threads: int, timeout_s: float) -> None:
        self._num_threads, self._timeout_s = num_threads, timeout_s
        self._spins = count * num_threads <= usable_cores()
        self._file = create_file(count, num_threads)
        self._opened: RankMemory | None = self._memory(Rank(0, count))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @property
    def files(self) -> tuple[int, ...]:
        return (self._file,)

    def join(self, rank: Rank) -> SharedExchange:
        library = load()
        assert library is not None, "the backend is supported"
        return SharedExchange(self._opened or self._memory(rank), library)

    def fail(self) -> None:
        assert self._opened is not None, "rank 0 fails it"
        self._opened.fail()

    def close(self) -> None:
        os.close(self._file)

    def _memory(self, rank: Rank) -> RankMemory:
        return RankMemory(
            self._file,
            rank.index,
            rank.count,
            self._num_threads,
            self._timeout_s,
            spins=self._spins,
        )


class SharedExchange:
    """An `Exchange` in memory that ranks share, of float32 and bfloat16, and a `ProgramExchange` in
    the same memory."""

    name = "shared memory"

    def __init__(self, memory: RankMemory, library: Library) -> None:
        self.memory, self._library = memory, library

    @property
    def seconds(self) -> float:
        return self.memory.seconds

    def sum_op(self, x: Tensor, count: Tensor) -> NativeOp:
        return sum_ranks_op(x, count, self.memory)

    def columns_op(self, x: Tensor, count: Tensor, part_size: int) -> NativeOp:
        return rank_columns_op(x, count, part_size, self.memory, to_all=False)

    def shrunk_op(self, lora: NativeLora, group: LoraGroup) -> NativeOp:
        return lora.sum_op(group, self.memory)

    def check(self) -> None:
        if self.memory.fault is not None:
            raise ExchangeFailed(str(self.memory.fault))

    def sum(self, x: Tensor) -> None:
        rows = x.view(1, -1)
        self._library.run(sum_ranks_op(rows, _count(rows), self.memory))
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

    def __init__(self, rank: Rank, exchange: Exchange) -> None:
        self._rank, self._exchange = rank, exchange
        self.name = exchange.name
        self._error: BaseException | None = None
        self.sum, self.side_by_side = exchange.sum, exchange.side_by_side

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
        size, first = x.shape[1], self._rank.index * part_size

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


def _count(x: Tensor) -> Tensor:
    return torch.tensor([len(x)], dtype=torch.int32)
