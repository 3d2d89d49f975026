"""Sums and rows that ranks of one machine exchange through memory that they share."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from inference_svc.backends.exchange import ExchangeFailed
from inference_svc.model.description import Rank
from kernels.native.library import Library, load
from kernels.ranks.memory import RankMemory, create_file
from kernels.ranks.native import rank_columns_op, sum_ranks_op


class SharedMeeting:
    """A `Meeting` in memory that processes share, of ranks that compute with as many threads."""

    def __init__(self, count: int, num_threads: int, timeout_s: float) -> None:
        self._num_threads, self._timeout_s = num_threads, timeout_s
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
        return RankMemory(self._file, rank.index, rank.count, self._num_threads, self._timeout_s)


class SharedExchange:
    """An `Exchange` in memory that ranks share, of float32 and bfloat16. Programs exchange in the
    same memory, and `check` then."""

    def __init__(self, memory: RankMemory, library: Library) -> None:
        self.memory, self._library = memory, library

    @property
    def seconds(self) -> float:
        return self.memory.seconds

    def check(self) -> None:
        """Raises ExchangeFailed if a run of operations has not exchanged all of its values."""
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


def _count(x: Tensor) -> Tensor:
    return torch.tensor([len(x)], dtype=torch.int32)
