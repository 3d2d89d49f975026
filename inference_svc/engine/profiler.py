"""Traces steps of the running engine with torch's profiler: on demand, one trace at a time.

Lives in the engine's thread, as the profiler sees only the thread that starts it. Without a trace
it costs a step a few attribute look-ups.
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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

# torch.profiler's own class is around this one; to begin it loads a compiler, seconds and 150 MB.
from torch.autograd.profiler import profile, record_function

from inference_svc.core import Call, Reply, StepTrace
from inference_svc.errors import NoSteps, ProfileRunning

log = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often an idle engine looks whether a trace is written."""
COMPRESS_LEVEL = 3
_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


class Marks:
    """Names parts of a step in the trace, while one is being made."""

    is_on = False

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return record_function(name) if self.is_on else _NOTHING


@dataclass(eq=False)
class _Tracing:
    """One trace, from when it is asked for until it is written. It has a `deadline_s` once the
    profiler is there. `writer` writes it; then there is an `answer`."""

    call_id: int
    num_steps: int
    timeout_s: float
    deadline_s: float | None = None
    profiler: profile | None = None
    num_done: int = 0
    writer: threading.Thread | None = None
    answer: Reply | None = None
    is_abandoned: bool = False

    @property
    def is_over(self) -> bool:
        """Nothing more is traced for it."""
        return self.writer is not None or self.answer is not None


@dataclass
class StepProfiler:
    """`device` is torch's name of what computes."""

    device: str
    marks: Marks = field(default_factory=Marks)
    _tracing: _Tracing | None = None
    _warmer: threading.Thread | None = None

    def start(self, call: Call) -> None:
        """From the next step on: `call.limit` steps, or as many as there are in `call.timeout_s`.
        Raises ProfileRunning."""
        if self._tracing is not None:
            raise ProfileRunning("another trace is being made", subject="num_steps")
        self._tracing = _Tracing(call.call_id, call.limit, call.timeout_s)
        if self._warmer is None:
            # The first trace of a process has a device's tools started, which takes long.
            self._warmer = threading.Thread(target=self._warm_up, name="loadout-trace-warm-up")
            self._warmer.start()

    def step(self) -> AbstractContextManager[object]:
        """Around what may become a step."""
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
        """Tokens were computed in this step."""
        if self._tracing is not None and self.marks.is_on:
            self._tracing.num_done += 1

    def poll(self, now_s: float) -> list[Reply]:
        """Between two steps: ends what is whole or due, and tells of what is written."""
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
                error = NoSteps("no step ran in this time", subject="timeout_seconds")
                return [Reply(tracing.call_id, error=error)]
            self._write(tracing)
        if tracing.answer is None or (tracing.writer is not None and tracing.writer.is_alive()):
            return []
        self._tracing = None
        if tracing.is_abandoned:
            _discard(tracing.answer)
        return [] if tracing.is_abandoned else [tracing.answer]

    def abandon(self, call_id: int) -> None:
        """Nobody waits for it any more."""
        tracing = self._tracing
        if tracing is None or tracing.call_id != call_id:
            return
        if tracing.writer is None:
            self._drop()
        else:
            tracing.is_abandoned = True

    def close(self) -> None:
        """The engine ends: so does a trace, unfinished."""
        if self._warmer is not None:
            self._warmer.join()
        tracing = self._tracing
        if tracing is not None and tracing.writer is not None:
            tracing.writer.join()
            _discard(tracing.answer)
        self._drop()

    @property
    def open_call_ids(self) -> list[int]:
        return [] if self._tracing is None else [self._tracing.call_id]

    def next_expiry_s(self) -> float | None:
        """When `poll` is to be called, though nothing else happens."""
        if self._tracing is None:
            return None
        if self._tracing.deadline_s is None or self._tracing.is_over:
            return time.monotonic() + LOOK_S
        return self._tracing.deadline_s

    # Within.

    def _make(self) -> profile:
        on_device = "cuda" if torch.device(self.device).type == "cuda" else None
        return profile(use_kineto=True, use_device=on_device)

    def _warm_up(self) -> None:
        try:
            with self._make():
                pass
        except Exception:
            log.exception("the profiler does not start")  # nor will it for the trace, which says so

    @property
    def _is_warming(self) -> bool:
        return self._warmer is not None and self._warmer.is_alive()

    def _stop(self, tracing: _Tracing) -> profile | None:
        self.marks.is_on = False
        profiler, tracing.profiler = tracing.profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
        return profiler

    def _fail(self, tracing: _Tracing, error: Exception) -> None:
        log.error("steps cannot be traced", exc_info=error)
        self.marks.is_on = False
        tracing.profiler = None
        tracing.answer = Reply(tracing.call_id, error=error)

    def _drop(self) -> None:
        if self._tracing is not None:
            self._stop(self._tracing)
            self._tracing = None

    def _write(self, tracing: _Tracing) -> None:
        """Writing takes longer than the steps did, and holds up none."""
        try:
            profiler = self._stop(tracing)
        except Exception as error:
            self._fail(tracing, error)
            return
        assert profiler is not None

        def write() -> None:
            try:
                path = _written(profiler.export_chrome_trace)
                tracing.answer = Reply(tracing.call_id, StepTrace(path, tracing.num_done))
            except Exception as error:
                log.exception("the trace cannot be written")
                tracing.answer = Reply(tracing.call_id, error=error)

        tracing.writer = threading.Thread(target=write, name="loadout-trace", daemon=True)
        tracing.writer.start()


def _written(export: Callable[[str], object]) -> str:
    """A file that nobody else may read, with the gzipped trace."""
    with tempfile.TemporaryDirectory(prefix="loadout-trace-") as folder:
        plain = Path(folder) / "trace.json"
        export(str(plain))
        number, path = tempfile.mkstemp(prefix="loadout-trace-", suffix=".json.gz")
        try:
            with (
                os.fdopen(number, "wb") as file,
                gzip.GzipFile("", "wb", COMPRESS_LEVEL, file) as packed,
                plain.open("rb") as source,
            ):
                shutil.copyfileobj(source, packed, 1 << 20)
        except BaseException:
            Path(path).unlink()
            raise
        return path


def _discard(answer: Reply | None) -> None:
    if answer is not None and isinstance(answer.result, StepTrace):
        answer.result.remove()
