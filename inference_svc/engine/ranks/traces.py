"""Traces of the steps of a rank other than the first, which that rank makes; see
`compute.profiler`."""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path

from inference_svc.engine.compute.profiler import PREFIX, StepProfiler
from inference_svc.engine.ranks.group import RankGroup
from inference_svc.engine.ranks.messages import ABANDON, TRACE, Traced
from inference_svc.engine.transport.messages import Call, Command, Reply, StepTrace
from inference_svc.errors import NoRoom, ProfileRunning
from servicekit.errors import InvalidArgument, ServiceError

POLL_S = 0.02
"""How often an idle engine checks whether a trace has come."""
_ORDER = struct.Struct("!qqd")
"""The number of a call, how many steps to trace, and the seconds to wait for them."""


class RankTraces:
    """Rank 0's side: has another rank trace its steps, one trace at a time. The engine's thread
    calls all methods."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._call: Call | None = None
        self._answer: Reply | None = None
        group.on_traced = self._take

    @property
    def open_call_ids(self) -> list[int]:
        return [] if self._call is None else [self._call.call_id]

    def start(self, call: Call) -> None:
        """Begins a trace of `call.rank` with its next step; see `StepProfiler.start`. Raises
        ProfileRunning, InvalidArgument for a rank that there is not, and EngineFailed."""
        if self._call is not None:
            raise ProfileRunning("another trace is being made", subject="num_steps")
        if call.rank >= self._group.count:
            count = self._group.count
            raise InvalidArgument(f"rank must be below {count}: there are {count}", subject="rank")
        order = _ORDER.pack(call.call_id, call.limit, call.timeout_s)
        with self._lock:
            self._call, self._answer = call, None
        self._group.send_to(call.rank, TRACE + order)

    def poll(self) -> list[Reply]:
        """Returns the reply of a trace that has come."""
        with self._lock:
            if self._answer is None:
                return []
            answer, self._call, self._answer = self._answer, None, None
        return [answer]

    def abandon(self, call_id: int) -> None:
        """Ends the trace of this call, whose caller has left. Raises EngineFailed."""
        call = self._call
        if call is not None and call.call_id == call_id:
            self.close()
            self._group.send_to(call.rank, ABANDON + _ORDER.pack(call_id, 0, 0.0))

    def close(self) -> None:
        """Waits for no trace any more, and removes the file of one that has come."""
        with self._lock:
            answer, self._call, self._answer = self._answer, None, None
        if answer is not None and isinstance(answer.result, StepTrace):
            answer.result.remove()

    def next_expiry_s(self) -> float | None:
        """Returns when `poll` must be called even if nothing else happens."""
        return None if self._call is None else time.monotonic() + POLL_S

    def _take(self, traced: Traced) -> None:
        """Takes a rank's answer, in the thread that reads its messages."""
        with self._lock:
            if self._call is None or self._call.call_id != traced.call_id:
                return
            try:
                self._answer = _reply(traced)
            except OSError as error:
                self._answer = Reply(traced.call_id, error=NoRoom(f"a trace is lost: {error}"))


def _reply(traced: Traced) -> Reply:
    """Returns the reply to a call, with the trace in a file. Raises OSError."""
    if traced.error is not None:
        return Reply(traced.call_id, error=traced.error)
    file, path = tempfile.mkstemp(".json.gz", PREFIX)
    with os.fdopen(file, "wb") as target:
        target.write(traced.content)
    return Reply(traced.call_id, StepTrace(path, traced.num_steps))


class OwnTraces:
    """Another rank's side: traces its steps when rank 0 asks. One thread, which computes, calls all
    methods; `send` is called with a Traced."""

    def __init__(self, device: str | None, send: Callable[[Traced], None]) -> None:
        """`device`: see `StepProfiler`."""
        self._profiler, self._send = StepProfiler(device), send

    def take(self, frame: bytes) -> None:
        """Begins a trace, or ends one whose caller has left; `frame` has its kind."""
        call_id, num_steps, timeout_s = _ORDER.unpack(frame[1:])
        if frame[:1] == ABANDON:
            self._profiler.abandon(call_id)
            return
        call = Call(call_id, Command.PROFILE, limit=num_steps, timeout_s=timeout_s)
        try:
            self._profiler.start(call)
        except ServiceError as error:
            self._send(Traced(call_id, error=error))

    def receive(self, steps: Connection) -> bytes:
        """Returns the next frame, and ends traces that are complete or due meanwhile. Raises
        EOFError."""
        while (expiry_s := self._profiler.next_expiry_s()) is not None:
            for reply in self._profiler.poll(time.monotonic()):
                self._send(_traced(reply))
            if steps.poll(max(0.0, expiry_s - time.monotonic())):
                break
        return steps.recv_bytes()

    def give_up(self) -> None:
        """Removes the files, from any thread: the process ends."""
        self._profiler.give_up()

    def step(self) -> AbstractContextManager[object]:
        """Surrounds a step."""
        return self._profiler.step()

    def stepped(self) -> None:
        """Counts a step that computed tokens."""
        self._profiler.stepped()


def _traced(reply: Reply) -> Traced:
    """Returns a rank's answer, and removes the trace's file."""
    trace, error = reply.result, reply.error
    if error is not None and not isinstance(error, ServiceError):  # it may not pickle
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(trace, StepTrace):
        return Traced(reply.call_id, error=error)
    try:
        return Traced(reply.call_id, Path(trace.path).read_bytes(), trace.num_steps)
    except OSError as lost:
        return Traced(reply.call_id, error=NoRoom(f"a trace is lost: {lost}"))
    finally:
        trace.remove()
