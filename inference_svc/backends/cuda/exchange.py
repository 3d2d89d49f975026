"""Values that ranks exchange on their devices, in steps and in recordings of them: NCCL.

An exchange is queued where the step is, so that nothing waits for it but the operations behind it,
and a recorded step has it as a node. Its errors come late, or never: on the device, a sum goes on
for ever whose other rank has ended. So whoever needs results calls `wait`, which looks again and
again whether they are there. It returns when they are, when a rank is known to have failed, or when
it has taken too long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from inference_svc.backends.exchange import (
    LOCAL,
    ExchangeFailed,
    GlooMeeting,
    Place,
    stage_pairs,
)
from inference_svc.host.device_faults import find_fault
from inference_svc.model.description import Rank
from kernels.streams import Stream, Streams

START_S = 300.0
"""How long ranks may wait for each other while they compile kernels and record steps, which takes
them different times."""
ABORT_S = 5.0
"""How long the end of a group may take."""
CONNECT_POLL_S = 0.1
"""How soon it is noticed that a rank has failed while others connect."""
NCCL_S = 1800.0
"""NCCL's own limit, for exchanges that are not recorded. It is longer than ours, which name the
rank that is missing."""
_TORCH: Any = distributed_c10d


class Groups(NamedTuple):
    """A rank's process groups of torch.distributed: of the ranks of its stage, and of all; of one
    rank there is none. `to_stages` and `from_stages` are of two ranks, this one and a partner that
    gets its values, or hands it some, by the partner's stage. `every` has each once, in an order in
    which all ranks can connect one after the other."""

    of_stage: Any | None
    of_all: Any | None
    to_stages: Mapping[int, Any]
    from_stages: Mapping[int, Any]
    every: Sequence[Any]

    @classmethod
    def of(cls, place: Place, make: Callable[[str, Rank], Any]) -> Groups:
        """Makes the groups of a rank, which their other ranks make under the same names."""
        num_ranks, num_stages = place.num_ranks, place.num_stages
        of_stage, every = None, list[Any]()
        if num_ranks > 1 or num_stages == 1:
            of_stage = make(f"stage {place.stage}", Rank(place.rank, num_ranks))
            every.append(of_stage)
        if num_stages == 1:
            return cls(of_stage, of_stage, {}, {}, every)
        of_all = make("all", Rank(place.in_stage(place.stage), num_ranks * num_stages))
        every.append(of_all)
        to_stages, from_stages = dict[int, Any](), dict[int, Any]()
        for source, target, index in stage_pairs(num_ranks, num_stages):
            name = f"{source} to {target}, {index}"
            if (source, index) == (place.stage, place.rank):
                to_stages[target] = make(name, Rank(0, 2))
                every.append(to_stages[target])
            elif (target, index) == (place.stage, place.rank):
                from_stages[source] = make(name, Rank(1, 2))
                every.append(from_stages[source])
        return cls(of_stage, of_all, to_stages, from_stages, every)


class DeviceExchange:
    """A `StagedExchange` through process groups, which queues on the current stream, `stream`.
    `wait` takes at most `limit_s`. All but `fail` belongs to the thread that computes.

    16-bit sums are of 16-bit terms: two ranks round once, and each further rank once more. All
    ranks get the same bits, because each element is summed in one place. A stage hands values on by
    a broadcast to two ranks, which a recording has as it has sums.
    """

    seconds = 0.0
    """Unknown: steps exchange without the host."""

    def __init__(
        self,
        place: Place,
        groups: Groups,
        device: torch.device,
        stream: Stream,
        limit_s: float,
        name: str,
    ) -> None:
        self.name = name
        self._num_ranks, self._groups, self._limit_s = place.num_ranks, groups, limit_s
        self._queued = stream.event()
        self._failed = threading.Event()
        # A rank that has no memory left can still say so.
        self._num_undone = torch.zeros(1, device=device)

    def sum(self, x: Tensor) -> None:
        self._sum(x, self._groups.of_stage)

    def sum_stages(self, x: Tensor) -> None:
        self._sum(x, self._groups.of_all)

    def _sum(self, x: Tensor, group: Any | None) -> None:
        options = _TORCH.AllreduceOptions()
        options.asyncOp = False  # on this stream, and not on one of the group's own
        with self._queueing():
            if group is not None:
                _wait_for(group.allreduce([x], options))

    def side_by_side(self, x: Tensor) -> Tensor:
        group, num_ranks, (num_rows, width) = self._groups.of_stage, self._num_ranks, x.shape
        if group is None:
            return x
        own, found = x.contiguous(), x.new_empty(num_ranks * num_rows, width)
        options = _TORCH.AllgatherOptions()
        options.asyncOp = False
        with self._queueing():
            _wait_for(group._allgather_base(found, own, options))
        by_rank = found.view(num_ranks, num_rows, width)
        return by_rank.transpose(0, 1).reshape(num_rows, -1)

    def send(self, x: Tensor, stage: int) -> None:
        self._broadcast(x, self._groups.to_stages[stage])

    def receive(self, x: Tensor, stage: int) -> None:
        self._broadcast(x, self._groups.from_stages[stage])

    def broadcast(self, x: Tensor) -> None:
        self._broadcast(x, self._groups.of_stage)

    def broadcast_stages(self, x: Tensor) -> None:
        self._broadcast(x, self._groups.of_all)

    def _broadcast(self, x: Tensor, group: Any | None) -> None:
        """Broadcasts from the first rank of a group."""
        options = _TORCH.BroadcastOptions()
        options.asyncOp = False
        with self._queueing():
            if group is not None:
                _wait_for(group.broadcast([x], options))

    def connect(self) -> None:
        """Has each group exchange once in each way of steps, so that no step has to connect it. All
        ranks call it."""
        groups = self._groups
        pairs = [*groups.to_stages.values(), *groups.from_stages.values()]
        for group in groups.every:
            if group not in pairs:
                self._sum(self._num_undone, group)
            self._broadcast(self._num_undone, group)
        self.agree(True)

    @contextlib.contextmanager
    def _queueing(self) -> Iterator[None]:
        """Raises a group's errors, but not a device's, as ExchangeFailed."""
        self.check()
        try:
            yield
        except RuntimeError as error:
            if find_fault(error) is not None:
                raise
            raise ExchangeFailed(str(error)) from error

    def check(self) -> None:
        """Raises ExchangeFailed if a rank is known to have failed."""
        if self._failed.is_set():
            raise ExchangeFailed("another rank has failed")

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until all that is queued has run, at most so long, or as long as usual. Raises
        ExchangeFailed: what has run then is not what was to be computed."""
        self._queued.record()
        limit_s = limit_s or self._limit_s
        end_s = time.monotonic() + limit_s
        while not self._queued.query():
            self.check()
            if time.monotonic() > end_s:
                raise ExchangeFailed(f"a step has not ended for {limit_s:g} s")
            time.sleep(0)  # other threads may run
        self.check()

    def agree(self, is_done: bool, /) -> bool:
        """Returns whether it is done on all ranks of all stages, which all ask, and waits for
        them."""
        self._num_undone.fill_(not is_done)
        self.sum_stages(self._num_undone)
        self.wait(START_S)
        return self._num_undone.item() == 0

    def fail(self) -> None:
        """Has the computing thread stop waiting, because a rank has failed. From any thread."""
        if not self._failed.is_set():
            self._failed.set()
            self._begin_abort()

    def close(self) -> None:
        """Ends the groups, of which others may have ended."""
        self._failed.set()
        end_s = time.monotonic() + ABORT_S
        for thread in self._begin_abort():
            thread.join(max(0.0, end_s - time.monotonic()))

    def _begin_abort(self) -> list[threading.Thread]:
        """Lets go of what the groups have queued, which may never end. That may take its time."""

        def abort(group: Any) -> None:
            with contextlib.suppress(RuntimeError):
                group.abort()

        # One at a time, a group would wait for what another has queued before.
        threads = [
            threading.Thread(target=abort, args=(group,), name="loadout-abort", daemon=True)
            for group in self._groups.every
        ]
        for thread in threads:
            thread.start()
        return threads


def _wait_for(work: Any) -> None:
    """Has the stream wait for a group's work; on a CPU, the thread. None: it does already."""
    if work is not None:
        work.wait()


class BlockingExchange:
    """The same as another exchange, for whoever reads results at once."""

    def __init__(self, exchange: DeviceExchange) -> None:
        self._exchange = exchange
        self.name = exchange.name

    @property
    def seconds(self) -> float:
        return self._exchange.seconds

    def sum(self, x: Tensor) -> None:
        self._exchange.sum(x)
        self._exchange.wait()

    def sum_stages(self, x: Tensor) -> None:
        self._exchange.sum_stages(x)
        self._exchange.wait()

    def side_by_side(self, x: Tensor) -> Tensor:
        found = self._exchange.side_by_side(x)
        self._exchange.wait()
        return found

    def broadcast(self, x: Tensor) -> None:
        self._exchange.broadcast(x)
        self._exchange.wait()

    def broadcast_stages(self, x: Tensor) -> None:
        self._exchange.broadcast_stages(x)
        self._exchange.wait()

    def send(self, x: Tensor, stage: int) -> None:
        self._exchange.send(x, stage)
        self._exchange.wait()

    def receive(self, x: Tensor, stage: int) -> None:
        self._exchange.receive(x, stage)
        self._exchange.wait()


class DeviceMeeting(GlooMeeting):
    """A `Meeting` of ranks that compute on the current device of their process, at a store as
    gloo's, where they find each other for NCCL."""

    def __init__(
        self, count: int, timeout_s: float, address: str = LOCAL, num_stages: int = 1
    ) -> None:
        super().__init__(count, timeout_s, address, num_stages)
        self._exchange: DeviceExchange | None = None
        self._has_failed = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_exchange": None}

    def join(self, rank: Rank) -> DeviceExchange:
        # Groups look things up there later, too.
        store = self._store = self.open_store()
        place = Place.of(rank, self._num_stages)

        def make(name: str, rank: Rank) -> Any:
            return self.make_group(rank, _TORCH.PrefixStore(name, store))

        try:
            groups = Groups.of(place, make)
        except RuntimeError as error:
            raise ExchangeFailed(f"ranks did not meet: {error}") from error
        stream = Streams.of(self.device).compute
        # A stage waits for all before it.
        limit_s = self._num_stages * self._timeout_s
        exchange = DeviceExchange(place, groups, self.device, stream, limit_s, self.name)
        self._exchange = exchange
        if self._has_failed:
            exchange.fail()
        self._connect(exchange)
        return exchange

    def _connect(self, exchange: DeviceExchange) -> None:
        """Connects ranks, so that no step has to. NCCL does so in a call that never returns if
        another rank ends meanwhile: another thread makes it."""
        device, connected = self.device, Future[None]()

        def connect() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # of this thread
                exchange.connect()
                connected.set_result(None)
            except BaseException as error:
                connected.set_exception(error)

        threading.Thread(target=connect, name="loadout-connect", daemon=True).start()
        end_s = time.monotonic() + START_S
        while not wait([connected], CONNECT_POLL_S).done:
            exchange.check()
            if time.monotonic() > end_s:
                raise ExchangeFailed(f"ranks have not connected for {START_S:g} s")
        connected.result()

    name = "NCCL"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def make_group(self, rank: Rank, store: Any) -> Any:
        """Returns one of this process's groups, whose ranks find each other at a store of their
        own. Raises RuntimeError."""
        nccl = _TORCH.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=NCCL_S)
        return nccl(store, rank.index, rank.count, options)

    def fail(self) -> None:
        self._has_failed = True
        if self._exchange is not None:
            self._exchange.fail()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        super().close()
