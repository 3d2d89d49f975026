"""Sums and rows that ranks exchange through a process group of torch.distributed."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inference_svc.model.description import Rank

LOCAL = "127.0.0.1"
_TORCH: Any = dist
_ROUNDED = (torch.float16, torch.bfloat16)


class ExchangeFailed(RuntimeError):
    """Another rank has ended, or has not answered in time."""


def meeting_point(count: int, timeout_s: float, port: int = 0) -> Any:
    """Returns the store through which so many ranks meet: a new one, or the one at this port.

    Raises ExchangeFailed when there is none for `timeout_s`; so long ranks wait for each other."""
    timeout = timedelta(seconds=timeout_s)
    if port:
        try:
            return _TORCH.TCPStore(
                LOCAL, port, count, is_master=False, wait_for_workers=False, timeout=timeout
            )
        except RuntimeError as error:
            raise ExchangeFailed(f"ranks did not meet: {error}") from error
    # By itself it would listen on all of the machine's addresses.
    listening = socket.create_server((LOCAL, 0))
    return _TORCH.TCPStore(
        LOCAL,
        listening.getsockname()[1],
        count,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


class GlooExchange:
    """An `Exchange` of processes on one machine, on CPUs.

    Made at the same time on all ranks, which find each other through `store`. A rank that does not
    come, or answer, for `timeout_s` fails the exchange. Raises ExchangeFailed.
    """

    def __init__(self, rank: Rank, store: Any, timeout_s: float) -> None:
        self._rank = rank
        # Not the process's default group: several engines may live in one process.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOCAL)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = gloo(store, rank.index, rank.count, options)
        except RuntimeError as error:
            raise ExchangeFailed(f"ranks did not meet: {error}") from error

    def sum(self, x: Tensor) -> None:
        if x.dtype in _ROUNDED:  # rounded once, in the end
            wide = x.float()
            self._sum(wide)
            x.copy_(wide)
        else:
            self._sum(x)

    def _sum(self, x: Tensor) -> None:
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise ExchangeFailed(str(error)) from error

    def side_by_side(self, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(self._rank.count)]
        try:
            self._group.allgather([found], [x]).wait()
        except RuntimeError as error:
            raise ExchangeFailed(str(error)) from error
        return torch.cat(found, dim=1)
