"""Traces of steps, without an engine: bounded, no file stays behind, and a profiler that fails ends
nothing but its own trace."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_svc.engine.compute.profiler import StepProfiler, profile
from inference_svc.engine.transport.messages import Call, Command, Reply, StepTrace
from inference_svc.errors import NoRoom, NoSteps
from tests.support.wait import TIMEOUT_S, until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def profiler(folder: Path) -> Iterator[StepProfiler]:
    made = StepProfiler(None)
    yield made
    made.close()
    assert not made.open_call_ids
    assert not list(folder.iterdir())


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler stops, and fails."""
    end = profile.__exit__

    def broken(self: profile, *exc: object) -> None:
        end(self, *exc)
        if self.kineto_results is not None and self.kineto_results.events():  # not the warmer's
            raise RuntimeError("no profile")

    monkeypatch.setattr(profile, "__exit__", broken)


def begin(profiler: StepProfiler, num_steps: int = 2, timeout_s: float = 60.0) -> None:
    """The next step is traced."""
    profiler.start(Call(7, Command.PROFILE, limit=num_steps, timeout_s=timeout_s))

    def is_begun() -> bool:
        assert profiler.poll(0.0) == []
        return profiler.next_expiry_s() == timeout_s

    until(is_begun)


def step(profiler: StepProfiler, num: int = 1) -> None:
    for _ in range(num):
        with profiler.step():
            torch.ones(2).add(1)
        profiler.stepped()


def answer(profiler: StepProfiler, now_s: float = 0.0) -> Reply:
    [reply] = until(lambda: profiler.poll(now_s))
    assert reply.call_id == 7
    return reply


def test_trace_is_a_private_file(profiler: StepProfiler, folder: Path) -> None:
    begin(profiler)
    step(profiler, 2)
    found = answer(profiler).result
    assert isinstance(found, StepTrace)
    assert found.num_steps == 2
    assert list(folder.iterdir()) == [Path(found.path)]
    assert Path(found.path).stat().st_mode & 0o777 == 0o600
    found.remove()


@pytest.mark.usefixtures("breaks")
def test_profiler_failure_fails_one_trace(profiler: StepProfiler) -> None:
    begin(profiler)
    step(profiler, 2)
    assert str(answer(profiler).error) == "no profile"
    begin(profiler)
    step(profiler)
    profiler.abandon(7)
    assert not profiler.open_call_ids
    begin(profiler)
    with profiler.step():
        torch.ones(2)  # and no tokens
    assert isinstance(answer(profiler, now_s=60.0).error, NoSteps)
    begin(profiler)
    step(profiler)
    profiler.close()
    assert not profiler.marks.is_on


@pytest.fixture
def may_copy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Traces are written no further than to their last copy until it is set."""
    event = threading.Event()
    copy = shutil.copyfileobj

    def slow(*arguments: Any) -> None:
        assert event.wait(TIMEOUT_S)
        copy(*arguments)

    monkeypatch.setattr(shutil, "copyfileobj", slow)
    return event


@pytest.mark.parametrize("how", ["give_up", "close", "abandon"])
def test_abandoned_write_leaves_no_file(
    profiler: StepProfiler, folder: Path, may_copy: threading.Event, how: str
) -> None:
    begin(profiler)
    step(profiler, 2)
    assert profiler.poll(0.0) == []
    until(lambda: list(folder.glob("*/*.gz")))
    if how == "give_up":  # the process may end now
        profiler.give_up()
        assert not list(folder.iterdir())
        may_copy.set()
        return
    may_copy.set()
    if how == "abandon":
        profiler.abandon(7)
        until(lambda: profiler.poll(0.0) == [] and not profiler.open_call_ids)
    else:
        profiler.close()
    assert not list(folder.iterdir())


def test_abandoned_trace_file_is_removed(
    profiler: StepProfiler, folder: Path, may_copy: threading.Event
) -> None:
    begin(profiler)
    step(profiler, 2)
    assert profiler.poll(0.0) == []  # a reply's file would be its receiver's
    may_copy.set()
    until(lambda: list(folder.glob("*.json.gz")))
    profiler.give_up()
    until(lambda: not list(folder.iterdir()))


def test_trace_size_is_bounded(profiler: StepProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.engine.compute.profiler.MAX_EVENTS", 10)
    begin(profiler, num_steps=10)
    step(profiler, 10)
    error = answer(profiler).error
    assert isinstance(error, NoRoom)
    assert error.subject == "num_steps"
    assert "events, more than 10: trace at most " in error.message
    monkeypatch.setattr("inference_svc.engine.compute.profiler.MAX_EVENTS", 1000)
    monkeypatch.setattr("inference_svc.engine.compute.profiler.BYTES_PER_EVENT", 1 << 50)
    begin(profiler)
    step(profiler, 2)
    error = answer(profiler).error
    assert isinstance(error, NoRoom)
    assert "bytes of temporary files, and" in error.message
