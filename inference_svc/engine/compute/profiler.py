"""Traces steps of the running engine with torch's profiler: on demand, one trace at a time.

Lives in the engine's thread, as the profiler sees only the thread that starts it. Without a trace
it costs a step a few attribute accesses.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

# torch.profiler's own class is around this one; to begin it loads a compiler, seconds and 150 MB.
from torch.autograd.profiler import profile, record_function

from inference_svc.engine.transport.messages import Call, Reply, StepTrace
from inference_svc.errors import NoRoom, NoSteps, ProfileRunning
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""How often an idle engine checks whether a trace is written."""
MAX_EVENTS = 500_000
"""Some hundred MB of JSON, and seconds to write them."""
BYTES_PER_EVENT = 1000
"""Upper bound, in JSON; operators take a quarter of it, kernels on a device half."""
COMPRESS_LEVEL = 3
PREFIX = "loadout-trace-"
_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


class Marks:
    """Names parts of a step in the trace, while one is being made."""

    is_on = False

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return record_function(name) if self.is_on else _NOTHING


@dataclass(eq=False)
class _Tracing:
    """One trace, from its request until it is written. It has a `deadline_s` once the
    profiler is there. `writer` writes it, in `folder`; then there is an `answer`."""

    call_id: int
    num_steps: int
    timeout_s: float
    deadline_s: float | None = None
    profiler: profile | None = None
    num_done: int = 0
    writer: threading.Thread | None = None
    folder: Path | None = None
    answer: Reply | None = None
    is_abandoned: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all of its steps have been traced."""
        return self.writer is not None or self.answer is not None

    def abandon(self) -> None:
        """Removes the files, now and, if one is being written, when that is there."""
        self.is_abandoned = True
        if self.folder is not None:
            _remove_folder(self.folder)
        if self.answer is not None and isinstance(self.answer.result, StepTrace):
            self.answer.result.remove()


@dataclass
class StepProfiler:
    """`device` is the profiler's name of the device, if that is not the CPU."""

    device: str | None
    marks: Marks = field(default_factory=Marks)
    _tracing: _Tracing | None = None
    _warmer: threading.Thread | None = None

    def start(self, call: Call) -> None:
        """Begins a trace with the next step: of `call.limit` steps, or as many as there are in
        `call.timeout_s`. Raises ProfileRunning."""
        if self._tracing is not None:
            raise ProfileRunning("another trace is being made", subject="num_steps")
        self._tracing = _Tracing(call.call_id, call.limit, call.timeout_s)
        if self._warmer is None:
            # The first trace of a process has a device's tools started, which takes long.
            self._warmer = threading.Thread(target=self._warm_up, name="loadout-trace-warm-up")
            self._warmer.start()

    def step(self) -> AbstractContextManager[object]:
        """Surrounds the code that may become a step."""
        tracing = self._tracing
        if tracing is None or tracing.deadline_s is None or tracing.is_over:
            return _NOTHING
        if tracing.profiler is None:
            try:
                tracing.profiler = self._make()
                tracing.profiler.__enter__()
            except Exception as error:  # no reason to end the engine
                self._fail(tracing, error)
                return _NOTHING
            self.marks.is_on = True
        return self.marks("step")

    def stepped(self) -> None:
        """Counts a step that computed tokens."""
        if self._tracing is not None and self.marks.is_on:
            self._tracing.num_done += 1

    def poll(self, now_s: float) -> list[Reply]:
        """Ends, between two steps, a trace that is complete or due; returns its reply once
        written."""
        tracing = self._tracing
        if tracing is None or (tracing.deadline_s is None and self._is_warming):
            return []
        if tracing.deadline_s is None:
            tracing.deadline_s = now_s + tracing.timeout_s
        if tracing.writer is None and tracing.answer is None:
            if tracing.num_done < tracing.num_steps and now_s < tracing.deadline_s:
                return []
            if not tracing.num_done:
                self._drop()
                error = NoSteps(
                    "no step ran in this time: send requests meanwhile", subject="timeout_seconds"
                )
                return [Reply(tracing.call_id, error=error)]
            self._write(tracing)
        if tracing.answer is None or (tracing.writer is not None and tracing.writer.is_alive()):
            return []
        self._tracing = None
        return [] if tracing.is_abandoned else [tracing.answer]

    def abandon(self, call_id: int) -> None:
        """Ends the trace of this call, whose caller has left."""
        tracing = self._tracing
        if tracing is None or tracing.call_id != call_id:
            return
        if tracing.writer is None:
            self._drop()
        else:
            tracing.abandon()

    def give_up(self) -> None:
        """Removes the files: the engine has failed, and its process may end at any moment."""
        if self._tracing is not None:
            self._tracing.abandon()

    def close(self) -> None:
        """Ends an unfinished trace, and the threads."""
        if self._warmer is not None:
            self._warmer.join()
        tracing = self._tracing
        if tracing is not None:
            tracing.abandon()
            if tracing.writer is not None:
                tracing.writer.join()
        self._drop()

    @property
    def open_call_ids(self) -> list[int]:
        return [] if self._tracing is None else [self._tracing.call_id]

    def next_expiry_s(self) -> float | None:
        """Returns when `poll` must be called even if nothing else happens."""
        if self._tracing is None:
            return None
        if self._tracing.deadline_s is None or self._tracing.is_over:
            return time.monotonic() + POLL_S
        return self._tracing.deadline_s

    def _make(self) -> profile:
        return profile(use_kineto=True, use_device=self.device)

    def _warm_up(self) -> None:
        try:
            with self._make():
                pass
        except Exception:
            logger.exception(
                "the profiler does not start"
            )  # the trace will fail with the same error

    @property
    def _is_warming(self) -> bool:
        return self._warmer is not None and self._warmer.is_alive()

    def _stop(self, tracing: _Tracing) -> profile | None:
        """Returns the profiler with its records; None if there is none, or if it fails, which is
        the answer then and no reason to end the engine."""
        self.marks.is_on = False
        profiler, tracing.profiler = tracing.profiler, None
        if profiler is None:
            return None
        try:
            profiler.__exit__(None, None, None)
        except Exception as error:
            self._fail(tracing, error)
            return None
        return profiler

    def _fail(self, tracing: _Tracing, error: Exception) -> None:
        logger.error("steps cannot be traced", exc_info=error)
        self.marks.is_on = False
        tracing.profiler = None
        tracing.answer = Reply(tracing.call_id, error=error)

    def _drop(self) -> None:
        if self._tracing is not None:
            self._stop(self._tracing)
            self._tracing = None

    def _write(self, tracing: _Tracing) -> None:
        """Starts a thread that writes the trace, which takes longer than the steps did. They go on
        meanwhile, except while the records are collected, here, and formatted, which holds the
        interpreter."""
        profiler = self._stop(tracing)
        if profiler is None:
            return
        tracing.writer = threading.Thread(
            target=_write_trace, args=(tracing, profiler), name="loadout-trace", daemon=True
        )
        tracing.writer.start()


def _write_trace(tracing: _Tracing, profiler: profile) -> None:
    try:
        tracing.folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # readable by its owner only
        path = _write_file(profiler, tracing.num_done, tracing.folder)
        tracing.answer = Reply(tracing.call_id, StepTrace(path, tracing.num_done))
    except Exception as error:
        if not (tracing.is_abandoned or isinstance(error, ServiceError)):
            logger.exception("the trace cannot be written")
        tracing.answer = Reply(tracing.call_id, error=error)
    if tracing.folder is not None:
        _remove_folder(tracing.folder)
    if tracing.is_abandoned:  # meanwhile
        tracing.abandon()


def _remove_folder(folder: Path) -> None:
    """Removes the folder, even while a trace is being written into it: that write then ends with an
    OSError."""
    shutil.rmtree(folder, ignore_errors=True)


def _write_file(profiler: profile, num_steps: int, folder: Path) -> str:
    """Writes the gzipped trace and returns its path, next to the folder. Raises NoRoom for too many
    events or too little space; OSError, and errors of the profiler."""
    results = profiler.kineto_results
    assert results is not None, "it has been stopped"
    _check_size(len(results.events()), num_steps, shutil.disk_usage(folder).free)
    plain, packed = folder / "trace.json", folder / "trace.json.gz"
    profiler.export_chrome_trace(str(plain))
    with (
        os.fdopen(os.open(packed, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file,
        gzip.GzipFile("", "wb", COMPRESS_LEVEL, file) as target,
        plain.open("rb") as source,
    ):
        shutil.copyfileobj(source, target, 1 << 20)
    return str(packed.rename(f"{folder}.json.gz"))


def _check_size(num_events: int, num_steps: int, free_bytes: int) -> None:
    if num_events > MAX_EVENTS:
        fitting = num_steps * MAX_EVENTS // num_events
        raise NoRoom(
            f"the trace of {num_steps} steps has {num_events} events, more than {MAX_EVENTS}: "
            f"trace at most {max(1, fitting)} steps",
            subject="num_steps",
        )
    num_bytes = num_events * BYTES_PER_EVENT
    if num_bytes > free_bytes:
        raise NoRoom(
            f"the trace of {num_steps} steps takes up to {num_bytes} bytes of temporary files, and "
            f"{free_bytes} are free",
            subject="num_steps",
        )
