"""Sums and rows that ranks exchange through a process group of torch.distributed, and the places
where ranks meet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import Any, NamedTuple, Protocol

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


class StepAbandoned(RuntimeError):
    """This rank has failed within a step, in which the others wait for it: all have to end."""


class Place(NamedTuple):
    """A rank's place among the ranks of all stages, which have equally many: ranks of one stage are
    neighbours."""

    rank: int
    stage: int
    num_ranks: int
    num_stages: int

    @classmethod
    def of(cls, rank: Rank, num_stages: int) -> Place:
        """Returns the place of one of all ranks."""
        num_ranks = rank.count // num_stages
        stage, own = divmod(rank.index, num_ranks)
        return cls(own, stage, num_ranks, num_stages)

    def in_stage(self, stage: int) -> int:
        """Returns which of all ranks has the same place in another stage."""
        return stage * self.num_ranks + self.rank


def stage_pairs(num_ranks: int, num_stages: int) -> list[tuple[int, int, int]]:
    """Returns the stages of each two ranks of which the first hands values on to the second, and
    their index in both: each rank to the next stage's, and the first rank of a stage to rank 0."""
    onward = [
        (stage, stage + 1, index) for stage in range(num_stages - 1) for index in range(num_ranks)
    ]
    return [*onward, *((stage, 0, 0) for stage in range(1, num_stages))]


class Meeting(Protocol):
    """The place where ranks of all stages meet. Rank 0 opens it, and other ranks get a copy in
    their first message."""

    @property
    def files(self) -> tuple[int, ...]:
        """The files that processes of other ranks inherit."""

    def join(self, rank: Rank) -> Exchange:
        """Returns the exchange of one of all ranks; it may wait until all others join, too. Raises
        ExchangeFailed."""

    def fail(self) -> None:
        """Has exchanges that wait for a rank return, because it has ended. From any thread."""

    def close(self) -> None:
        """Closes the files. Exchanges stay as they are."""


class GlooMeeting:
    """A `Meeting` at a store of torch.distributed, with which the process that makes it listens at
    this address of its machine."""

    def __init__(
        self, count: int, timeout_s: float, address: str = LOCAL, num_stages: int = 1
    ) -> None:
        self._count, self._timeout_s, self._address = count, timeout_s, address
        self._num_stages = num_stages
        self._store = _listening_store(address, count, timeout_s)
        self._port: int = self._store.port

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None}

    @property
    def files(self) -> tuple[int, ...]:
        return ()

    def join(self, rank: Rank) -> Exchange:
        place = Place.of(rank, self._num_stages)
        address = own_address(self._address)
        return GlooExchange(place, self.open_store(), self._timeout_s, address)

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

    def __init__(self, place: Place, store: Any, timeout_s: float, address: str = LOCAL) -> None:
        self._place = place
        self.seconds = 0.0
        num_ranks, num_stages = place.num_ranks, place.num_stages

        def group(name: str, rank: Rank, timeout_s: float) -> Any:
            return gloo_group(rank, _TORCH.PrefixStore(name, store), timeout_s, address)

        try:
            own = Rank(place.rank, num_ranks)
            self._group = group(f"stage {place.stage}", own, timeout_s)
            self._stages: Any = None
            if num_stages > 1:  # a stage waits for all before it
                of_all = Rank(place.in_stage(place.stage), num_stages * num_ranks)
                self._stages = group("stages", of_all, num_stages * timeout_s)
        except RuntimeError as error:
            raise ExchangeFailed(f"ranks did not meet: {error}") from error

    def sum(self, x: Tensor) -> None:
        self._sum(x, self._group)

    def sum_stages(self, x: Tensor) -> None:
        self._sum(x, self._stages)

    def _sum(self, x: Tensor, group: Any) -> None:
        summed = x.float() if x.dtype in _ROUNDED else x  # rounded once, in the end
        with self._exchanging():
            group.allreduce([summed]).wait()
        if summed is not x:
            x.copy_(summed)

    def send(self, x: Tensor, stage: int) -> None:
        with self._exchanging():
            self._stages.send([_bytes_of(x)], self._place.in_stage(stage), 0).wait()

    def receive(self, x: Tensor, stage: int) -> None:
        with self._exchanging():
            self._stages.recv([_bytes_of(x)], self._place.in_stage(stage), 0).wait()

    def side_by_side(self, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(self._place.num_ranks)]
        with self._exchanging():
            self._group.allgather([found], [x]).wait()
        return torch.cat(found, dim=1)

    def broadcast(self, x: Tensor) -> None:
        with self._exchanging():
            self._group.broadcast([_bytes_of(x)]).wait()

    def broadcast_stages(self, x: Tensor) -> None:
        with self._exchanging():
            self._stages.broadcast([_bytes_of(x)]).wait()

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


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
