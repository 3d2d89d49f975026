"""The engine's process: how it starts, and how it ends: with us, without us, killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from inference_svc.core import EngineConfig
from inference_svc.engine.transport import process
from inference_svc.engine.transport.messages import Command
from inference_svc.engine.transport.process import EngineProcess
from inference_svc.errors import EngineFailed, UnsupportedModel
from tests.support import forks
from tests.support.wait import until
from tests.system.transports import StoreFactory, start_engine

GONE_S = 30.0
START_S = 120.0
"""What an engine that is no fork imports takes a minute on a machine that does much else."""


@pytest.fixture(scope="module")
def config(zoos: Callable) -> EngineConfig:
    return EngineConfig(
        zoos("llama").model_dir, "llama", max_model_len=256, kv_bytes=4 << 20, num_threads=1
    )


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    forks.address()  # begins a process that stays
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before
    assert forks.engines_of(os.getpid()) == []


@pytest.fixture
def forked() -> Iterator[None]:
    """Engines are forks, which start at once."""
    with forks.forked_engines():
        yield


@contextmanager
def begun(config: EngineConfig) -> Iterator[EngineProcess]:
    engine = EngineProcess(config, StoreFactory({}))
    try:
        yield engine
    finally:
        engine.stop()


@pytest.mark.usefixtures("forked")
def test_a_child_that_is_killed_is_a_failed_engine(config: EngineConfig, caplog: Any) -> None:
    running = start_engine("process", config, {})
    engine: Any = running.engine
    failures: list[Exception] = []
    on_outputs = running.on_outputs

    def collect(step: Any) -> None:
        if step.failure is not None:
            failures.append(step.failure)
        on_outputs(step)

    engine._on_outputs = collect
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(engine.pid, number)  # not for the child: this process gets them, too, and drains
    assert running.call(Command.DESCRIBE).result.num_running == 0
    os.kill(engine.pid, signal.SIGKILL)
    running.until(lambda: failures)
    assert isinstance(failures[0], EngineFailed)
    assert not engine.is_alive
    assert "was ended by SIGKILL" in caplog.text
    engine.stop()


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """Standard error goes to the file meanwhile. Unlike capfd's it is read as often as wanted, and
    nothing that a child writes then is lost."""
    usual = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(usual, 2)
        os.close(usual)


@pytest.mark.usefixtures("forked")
def test_a_child_says_where_it_is_and_goes_on(config: EngineConfig, tmp_path: Path) -> None:
    """The signal's own effect would be the child's end."""
    stderr = tmp_path / "stderr"
    with stderr_in(stderr):  # the child keeps it
        running = start_engine("process", config, {})
    engine: Any = running.engine
    running.call(Command.DESCRIBE)  # its thread runs
    engine.dump_stacks()
    until(lambda: "process_main.py" in stderr.read_text() or not engine.is_alive, GONE_S)
    assert engine.is_alive
    assert running.call(Command.DESCRIBE).result.num_running == 0
    engine.stop()
    said = stderr.read_text()
    assert "Thread 0x" in said
    assert "thread.py" in said, "the engine's own thread, too"


@pytest.mark.usefixtures("forked")
def test_what_cannot_be_sent_is_a_failed_engine(config: EngineConfig, caplog: Any) -> None:
    """Nobody waits for ever for the answer to a message that was lost."""
    running = start_engine("process", config, {})
    engine: Any = running.engine
    failures: list[Exception] = []
    engine._on_outputs = lambda step: failures.append(step.failure)
    engine.send(lambda: "does not pickle")
    engine._reader.join(GONE_S)
    assert [type(failure) for failure in failures] == [EngineFailed]
    assert "messages to the engine cannot be sent" in caplog.text
    engine.stop()


@pytest.mark.usefixtures("forked")
def test_a_system_without_memory_is_a_failed_engine(
    config: EngineConfig, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is whole, and no later message would be told from the files of this one."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOBUFS, "no buffers")

    running = start_engine("process", config, {})
    engine: Any = running.engine
    monkeypatch.setattr(process, "send_pixels", fail)
    running.submit("last", [5], max_tokens=1)
    until(lambda: not engine.is_alive, GONE_S)
    until(lambda: "was ended by SIGKILL" in caplog.text, GONE_S)
    assert "no buffers" in caplog.text
    engine.stop()


def test_a_child_goes_with_its_parent(config: EngineConfig, tmp_path: Path) -> None:
    """The parent is a fork, and its engine a process of its own."""
    program, log = tmp_path / "parent.py", tmp_path / "log"
    program.write_text("""
import sys, time
from tests.system.transports import start_engine
from tests.system.test_engine_process import config_at
running = start_engine("process", config_at(sys.argv[1]), {})
running.submit("runs", [5], max_tokens=200)
print(running.engine.pid, flush=True)
time.sleep(600)
""")
    parent = forks.start(str(program), [str(config.model_dir)], log)

    def pids() -> list[int]:
        """Warnings are in the log, too."""
        return [int(line) for line in log.read_text().splitlines() if line.isdecimal()]

    try:
        until(pids, START_S)
        child = psutil.Process(pids()[0])
        assert child.ppid() == parent.pid
    finally:
        parent.kill()
        parent.wait()
    child.wait(GONE_S)


def config_at(model_dir: str) -> EngineConfig:
    return EngineConfig(Path(model_dir), "llama", max_model_len=256, kv_bytes=4 << 20)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{}"), UnsupportedModel, "arch"),
        (lambda folder: None, ValueError, "--kv-memory of 1024 bytes"),
    ],
)
def test_a_start_that_fails_raises_here_as_there(
    config: EngineConfig, tmp_path: Path, change: Callable, kind: type[Exception], message: str
) -> None:
    shutil.copytree(config.model_dir, tmp_path / "model")
    change(tmp_path / "model")
    changed = EngineConfig(tmp_path / "model", "llama", kv_bytes=1024)
    with begun(changed) as engine, pytest.raises(kind, match=message):
        engine.load()


@pytest.mark.usefixtures("forked")
def test_a_child_that_dies_while_it_loads_is_reported(config: EngineConfig) -> None:
    with begun(config) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="SIGKILL"):
            engine.load()


@pytest.mark.usefixtures("forked")
def test_stop_before_it_has_loaded_leaves_nothing(config: EngineConfig) -> None:
    with begun(config):
        pass


class Undying:
    """A process in an uninterruptible call of the driver: not even SIGKILL ends it."""

    pid = 41

    def __init__(self) -> None:
        self.signals: list[int] = []

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        raise subprocess.TimeoutExpired("the engine", timeout_s)


@pytest.mark.usefixtures("forked")
def test_a_child_that_cannot_be_ended_is_not_waited_for(config: EngineConfig, caplog: Any) -> None:
    engine = EngineProcess(config, StoreFactory({}))
    real, undying = engine._process, Undying()
    engine._process = undying  # type: ignore[assignment]
    engine.stop(timeout_s=0)
    assert undying.signals == [signal.SIGKILL]
    assert "the engine's process 41 cannot be ended" in caplog.text
    assert "nvidia-smi -r" in caplog.text
    real.kill()
    real.wait()
