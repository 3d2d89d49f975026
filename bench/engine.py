"""Runs our engine in the benchmark's process, driven by messages as in the product."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from bench.store.copy import AddVariants, Checked, CheckIdle, StoreCopyFactory, check_idle
from bench.store.memory_store import MemoryStore, variant_digest
from inference_svc.core import AdapterKey, EngineConfig, FinishReason, Request, SamplingParams
from inference_svc.engine.control.status_types import EngineStatus
from inference_svc.engine.transport.messages import (
    Call,
    Cancel,
    Command,
    LayoutAccepted,
    StepOutputs,
    StoreMessage,
    Submit,
    Timings,
    Usage,
)
from inference_svc.engine.transport.process import EngineProcess
from inference_svc.engine.transport.thread import EngineThread

CALL_TIMEOUT_S = 600.0
TRANSPORTS = ("thread", "process")


@dataclass(slots=True)
class Track:
    """The outcome of one request. `token_times_s` has an entry for each output with tokens, on the
    clock of `time.monotonic`."""

    sent_s: float
    num_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)
    error: Exception | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    is_done: bool = False

    @property
    def first_token_s(self) -> float:
        """Seconds from the send to the first token."""
        return self.token_times_s[0] - self.sent_s


class BenchEngine:
    """An engine over a store in memory, in a thread, or in its own process with a copy of the
    store. One thread calls the methods."""

    def __init__(self, config: EngineConfig, store: MemoryStore, transport: str = "thread") -> None:
        self.store = store
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._tracks: dict[str, Track] = {}
        self._replies: dict[int, Any] = {}
        self._checked: list[Checked] = []
        self.engine: EngineThread | EngineProcess
        if transport == "process":
            make_store = StoreCopyFactory(store.folders)
            self.engine = EngineProcess(config, make_store, self._on_store_message).load()
        else:
            self.engine = EngineThread(config, store)
        self.engine.start(self._on_outputs)
        if isinstance(self.engine, EngineProcess):
            self.engine.send(StoreMessage(self.engine.layout))
        self.engine.send(LayoutAccepted(store.accept_layout(self.engine.layout)))

    @property
    def kernels(self) -> str:
        """The kernels in use, such as "native avx512_bf16"."""
        return self.describe().kernels

    def add_variants(self, digest: str, count: int) -> list[str]:
        """Makes `count` more adapters in the store from a registered one, and returns their
        digests."""
        if isinstance(self.engine, EngineThread):
            return self.store.add_variants(digest, count)
        self.engine.send(StoreMessage(AddVariants(digest, count)))
        return [variant_digest(digest, number) for number in range(count)]

    @property
    def resident_bytes(self) -> int:
        """Resident memory of this process and its children."""
        process = psutil.Process()
        everyone = [process, *process.children(recursive=True)]
        return sum(each.memory_info().rss for each in everyone)

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        key: AdapterKey = "",
        *,
        request_id: str = "",
        deadline_s: float | None = None,
        activation: int = 0,
        sampling: SamplingParams | None = None,
    ) -> Track:
        """Sends a request: greedy, to its last token, unless `sampling` is given."""
        sampling = sampling or SamplingParams(temperature=0.0, ignore_eos=True)
        request_id = request_id or f"r{next(self._numbers)}"
        sent_s = time.monotonic()
        self._tracks[request_id] = track = Track(sent_s)
        request = Request(
            request_id,
            tuple(prompt),
            replace(sampling, max_tokens=max_tokens),
            key=key,
            arrival_s=sent_s,
            deadline_s=deadline_s,
            activation=activation,
        )
        self.engine.send(Submit(request))
        return track

    def cancel(self, request_id: str) -> None:
        self.engine.send(Cancel(request_id))

    def wait(self, tracks: Iterable[Track], timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Waits until all requests have ended. Raises TimeoutError."""
        waiting = list(tracks)
        with self._changed:
            if not self._changed.wait_for(lambda: all(t.is_done for t in waiting), timeout_s):
                raise TimeoutError("requests did not end")

    def wait_any(self, tracks: Iterable[Track], timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Waits until one request has ended. Raises TimeoutError."""
        waiting = list(tracks)
        with self._changed:
            if not self._changed.wait_for(lambda: any(t.is_done for t in waiting), timeout_s):
                raise TimeoutError("no request ended")

    def wait_first_tokens(self, tracks: Iterable[Track], timeout_s: float) -> bool:
        """Waits until every request has a token or has ended; returns False after the timeout."""
        waiting = [track for track in tracks if not track.token_times_s]
        with self._changed:
            return self._changed.wait_for(
                lambda: all(t.token_times_s or t.is_done for t in waiting), timeout_s
            )

    def call(self, command: Command, digest: str = "", *, pin: bool = False) -> Any:
        """Returns the command's result. Raises the engine's error."""
        number = next(self._numbers)
        self.engine.send(Call(number, command, digest, pin))
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._replies, CALL_TIMEOUT_S):
                raise TimeoutError(f"the engine did not answer {command}")
            reply = self._replies.pop(number)
        if reply.error is not None:
            raise reply.error
        return reply.result

    def load(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.call(Command.LOAD, digest)

    def set_resident(self, digests: Iterable[str]) -> None:
        """Loads these adapters onto the device, and unloads all others from all memory."""
        wanted = set(digests)
        residents = self.call(Command.LIST_RESIDENT)
        for digest in {resident.digest for resident in residents} - wanted:
            self.call(Command.UNLOAD, digest)
        self.load(sorted(wanted))

    def describe(self) -> EngineStatus:
        status: EngineStatus = self.call(Command.DESCRIBE)
        return status

    def check_idle(self) -> None:
        """Asserts that the engine's counters agree, and that it holds nothing."""
        if isinstance(self.engine, EngineThread):
            check_idle(self.engine.built)
            return
        self.engine.send(StoreMessage(CheckIdle()))
        with self._changed:
            if not self._changed.wait_for(lambda: self._checked, CALL_TIMEOUT_S):
                raise TimeoutError("the engine's process did not check itself")
            error = self._checked.pop().error
        assert error is None, error

    def stop(self) -> None:
        self.engine.stop()

    def _on_store_message(self, content: Checked) -> None:
        with self._changed:
            self._checked.append(content)
            self._changed.notify_all()

    def _on_outputs(self, step: StepOutputs) -> None:
        now_s = time.monotonic()
        with self._changed:
            for output in step.outputs:
                track = self._tracks[output.request_id]
                if output.token_ids:
                    track.num_tokens += len(output.token_ids)
                    track.token_times_s.append(now_s)
                if output.is_last:
                    track.error, track.finish_reason = output.error, output.finish_reason
                    track.usage = output.usage
                    track.timings, track.is_done = output.timings, True
                    del self._tracks[output.request_id]
            for reply in step.replies:
                self._replies[reply.call_id] = reply
            if step.failure is not None:  # a dead process sends nothing more
                self._end_all(step.failure)
            self._changed.notify_all()

    def _end_all(self, error: Exception) -> None:
        for track in self._tracks.values():
            track.error, track.is_done = error, True
        self._tracks.clear()
