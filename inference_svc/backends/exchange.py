"""Sums and rows that ranks exchange through a process group of torch.distributed, and the places
where ranks meet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from inference_svc.model.description import Rank
from inference_svc.model.sharding.exchange import Exchange

LOCAL = "127.0.0.1"
_TORCH: Any = dist
_ROUNDED = (torch.float16, torch.bfloat16)


class ExchangeFailed(RuntimeError):
    """Another rank has ended, or has not answered in time."""


class Meeting(Protocol):
    """The place where ranks meet. Rank 0 opens it, and other ranks get a copy in their first
    message."""

    @property
    def files(self) -> tuple[int, ...]:
        """The files that processes of other ranks inherit."""

    def join(self, rank: Rank) -> Exchange:
        """Returns the exchange of a rank; it may wait until all others join, too. Raises
        ExchangeFailed."""

    def fail(self) -> None:
        """Has exchanges that wait for a rank return, because it has ended. From any thread."""

    def close(self) -> None:
        """Closes the files. Exchanges stay as they are."""


class GlooMeeting:
    """A `Meeting` at a store of torch.distributed, with which the process that makes it listens at
    this address of its machine."""

    def __init__(self, count: int, timeout_s: float, address: str = LOCAL) -> None:
        self._count, self._timeout_s, self._address = count, timeout_s, address
        self._store = _listening_store(address, count, timeout_s)
        self._port: int = self._store.port

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None}

    @property
    def files(self) -> tuple[int, ...]:
        return ()

    def join(self, rank: Rank) -> Exchange:
        return GlooExchange(rank, self.open_store(), self._timeout_s, own_address(self._address))

    def open_store(self) -> Any:
        """Returns the store. Raises ExchangeFailed."""
        if self._store is not None:
            return self._store
        return _store_at(self._address, self._port, self._count, self._timeout_s)

    def fail(self) -> None:
        """The system closes the connections of a process that ends."""

    def close(self) -> None:
        self._store = None


def own_address(address: str) -> str:
    """Returns the address by which this machine reaches the one with that address, and is reached
    by it. Raises ExchangeFailed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # which sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ExchangeFailed(f"ranks did not meet: no way to {address}: {error}") from error


def _listening_store(address: str, count: int, timeout_s: float) -> Any:
    # By itself it would listen on all of the machine's addresses.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    return _TORCH.TCPStore(
        address,
        listening.getsockname()[1],
        count,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )


def _store_at(address: str, port: int, count: int, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    try:
        return _TORCH.TCPStore(
            address, port, count, is_master=False, wait_for_workers=False, timeout=timeout
        )
    except RuntimeError as error:
        raise ExchangeFailed(f"ranks did not meet: {error}") from error


def gloo_group(rank: Rank, store: Any, timeout_s: float, address: str) -> Any:
    """Returns the group of processes on CPUs; see `GlooExchange`. Raises RuntimeError."""
    # Not the process's default group: several engines may live in one process.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank.index, rank.count, options)


class GlooExchange:
    """An `Exchange` of processes on CPUs, through connections of this machine's `address`.

    Made at the same time on all ranks, which find each other through `store`. A rank that does not
    come, or answer, for `timeout_s` fails the exchange. Raises ExchangeFailed.
    """

    name = "gloo"

    def __init__(self, rank: Rank, store: Any, timeout_s: float, address: str = LOCAL) -> None:
        self._rank = rank
        self.seconds = 0.0
        try:
            self._group = gloo_group(rank, store, timeout_s, address)
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
        with self._exchanging():
            self._group.allreduce([x]).wait()

    def side_by_side(self, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(self._rank.count)]
        with self._exchanging():
            self._group.allgather([found], [x]).wait()
        return torch.cat(found, dim=1)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Counts the seconds of an exchange, and raises its error as ExchangeFailed."""
        began_s = perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise ExchangeFailed(str(error)) from error
        finally:
            self.seconds += perf_counter() - began_s
