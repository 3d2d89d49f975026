"""Ranks that hang while they start, or cannot be started."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_svc.backends.exchange import GlooMeeting
from inference_svc.backends.native.backend import NativeFactory
from inference_svc.core import EngineConfig, Nodes
from inference_svc.engine.ranks import group
from inference_svc.engine.ranks.liveness import Limits, Liveness, Progress, progress
from inference_svc.engine.ranks.nodes import node
from inference_svc.engine.ranks.nodes.messages import Alive, Joined
from inference_svc.engine.ranks.nodes.node import Node
from inference_svc.engine.ranks.nodes.rendezvous import NodeRendezvous
from inference_svc.errors import EngineFailed
from servicekit.telemetry.logs import configure_logging
from tests.support.wait import until

LIMITS = Limits(ping_s=5, first_s=20, silence_s=10, stall_s=30)


def pinged(liveness: Liveness, count: int, *answers: Progress) -> Liveness:
    """Asks so many times; after each the rank reports this progress, if any is left."""
    left = iter(answers)
    for _ in range(count):
        liveness.asked()
        reported = next(left, None)
        if reported is not None:
            liveness.answered(reported)
    return liveness


def test_a_rank_may_take_longer_to_its_first_answer() -> None:
    assert pinged(Liveness(), 3).fault(LIMITS, serves=False) == ""
    assert pinged(Liveness(), 4).fault(LIMITS, serves=False) == "did not answer for 20 s"


def test_an_answer_is_due_soon_after_the_first() -> None:
    liveness = Liveness()
    liveness.answered()
    assert pinged(liveness, 1).fault(LIMITS, serves=True) == ""
    assert pinged(liveness, 1).fault(LIMITS, serves=True) == "does not answer"


@pytest.mark.parametrize("moved", [Progress(1.5, 8, 2), Progress(1, 9, 2), Progress(1, 8, 3)])
def test_any_progress_keeps_a_start(moved: Progress) -> None:
    first = Progress(1, 8, 2)
    liveness = pinged(Liveness(), 6, *[first] * 5, moved)
    assert liveness.fault(LIMITS, serves=False) == ""
    pinged(liveness, 6, *[moved] * 6)
    assert liveness.fault(LIMITS, serves=False) == "made no progress for 30 s"
    liveness.waits_for_steps = True
    assert liveness.fault(LIMITS, serves=False) == ""


def test_only_work_of_the_main_thread_is_progress() -> None:
    """As long as another thread waits, it moves nothing."""
    busy, found = threading.Event(), []

    def work() -> None:
        found.append(progress())
        busy.set()
        end_s = time.thread_time() + 0.05
        while time.thread_time() < end_s:
            pass
        found.append(progress())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    first, second = found
    assert second.cpu_s - first.cpu_s < 0.04
    end_s = time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass
    assert progress().cpu_s - second.cpu_s >= 0.05


@contextmanager
def starting(config: EngineConfig, make_store: Callable[[Any], Any]) -> Iterator[group.RankGroup]:
    failures: list[EngineFailed] = []
    ranks = group.RankGroup(config, NativeFactory(), make_store, failures.append)
    try:
        yield ranks
    finally:
        ranks.close()
    assert not failures, "nobody serves yet"


def hanging_store(publish: Callable[[object], None]) -> None:
    """Never returns, as a read of a file whose server is gone."""
    threading.Event().wait()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(tmp_path, "model", tensor_parallel=2)


@pytest.mark.processes
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_whose_start_gets_nowhere(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers all the same."""
    monkeypatch.setattr(group, "PING_S", 0.2)
    monkeypatch.setattr(group, "STALL_S", 2.0)
    with starting(config, hanging_store) as ranks:
        with pytest.raises(EngineFailed, match="rank 1 made no progress for 2 s while it started"):
            ranks.meet()
        pid = ranks.others[0].pid
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.processes
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_is_stopped_while_it_starts(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has answered, silence is short."""
    monkeypatch.setattr(group, "PING_S", 0.2)
    monkeypatch.setattr(group, "SILENCE_S", 1.0)
    with starting(config, hanging_store) as ranks:
        [rank] = ranks.others
        until(lambda: rank.liveness.has_answered)
        os.kill(rank.pid, signal.SIGSTOP)
        with pytest.raises(EngineFailed, match="rank 1 did not answer for 1 s while it started"):
            ranks.meet()


def logging_store(publish: Callable[[object], None]) -> None:
    """Configures the log as a server does, and hangs."""
    configure_logging("json", "debug")
    logging.getLogger("rank").debug("a detail")
    threading.Event().wait()


@pytest.mark.processes
@pytest.mark.usefixtures("forked_ranks")
def test_the_log_of_a_rank_names_it(config: EngineConfig, capfd: Any) -> None:
    """At its level, and to the last line, which says why the rank ends."""
    with starting(config, logging_store) as ranks:
        [rank] = ranks.others
        written: list[str] = []

        def is_there() -> bool:
            written.append(capfd.readouterr().err)
            return "a detail" in "".join(written)

        until(is_there)
        rank.send("no message")
        with pytest.raises(EngineFailed, match="rank 1 failed: AssertionError"):
            ranks.meet()
    written.append(capfd.readouterr().err)
    text = "".join(written)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found = [(each["rank"], each["level"], each["message"]) for each in lines]
    assert found == [(1, "DEBUG", "a detail"), (1, "ERROR", "rank 1 fails")]
    assert "AssertionError" in lines[1]["exception"]


@pytest.mark.processes
def test_a_rank_that_never_answers(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "PING_S", 0.2)
    monkeypatch.setattr(group, "FIRST_ANSWER_S", 1.0)
    with starting(config, hanging_store) as ranks:
        os.kill(ranks.others[0].pid, signal.SIGSTOP)
        with pytest.raises(EngineFailed, match="rank 1 did not answer for 1 s while it started"):
            ranks.meet()


@pytest.fixture
def fails_third(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The system refuses the third process that a module of ranks starts; returns the others'."""
    started: list[int] = []
    start = subprocess.Popen

    def refuse(*args: Any, **options: Any) -> Any:
        if len(started) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        process = start(*args, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", refuse)
    return started


def open_files() -> list[str]:
    """Returns this process's open files, and the memory that it shares with ranks."""
    gc.collect()
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted(links) + [each for each in maps if "loadout-ranks" in each]


@pytest.mark.processes
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_rank_that_cannot_be_started(
    config: EngineConfig, fails_third: list[int], num_nodes: int
) -> None:
    """The ranks before it end, and nothing stays open."""
    GlooMeeting(2, 1.0).close()  # torch keeps a pipe of the first
    before = open_files()
    rendezvous, config = None, replace(config, tensor_parallel=4 * num_nodes)
    if num_nodes > 1:
        config = replace(config, nodes=Nodes(num_nodes, 0, "127.0.0.1:0", 60, "secret"))
        rendezvous = NodeRendezvous(config, {})
    with pytest.raises(BlockingIOError):
        group.RankGroup(config, NativeFactory(), hanging_store, lambda error: None, rendezvous)
    assert [Path(f"/proc/{pid}").exists() for pid in fails_third] == [False, False]
    del rendezvous
    assert open_files() == before


@pytest.mark.processes
def test_a_rank_of_a_node_that_cannot_be_started(
    config: EngineConfig, fails_third: list[int]
) -> None:
    before = open_files()
    nodes = Nodes(2, 1, "127.0.0.1:1", 60, "secret")
    with pytest.raises(BlockingIOError):
        Node(replace(config, tensor_parallel=6, nodes=nodes), {}, hanging_store)
    assert [Path(f"/proc/{pid}").exists() for pid in fails_third] == [False, False]
    assert open_files() == before


HANGS = """
import os, sys, time
from multiprocessing.connection import Connection

with Connection(os.dup(0)) as parent:
    parent.recv_bytes()
    for message in sys.argv[1:]:
        parent.send_bytes(bytes.fromhex(message))
        time.sleep(0.3)
    time.sleep(600)
"""


@pytest.mark.processes
def test_a_rank_of_a_node_that_hangs(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 goes on without it: this machine has to find out itself, so as to start again."""
    said = [pickle.dumps(each).hex() for each in (Joined(), Alive(), Alive())]
    command = [sys.executable, "-c", HANGS, *said]
    monkeypatch.setattr(node, "rank_command", lambda module: command)
    monkeypatch.setattr(node, "PING_S", 0.1)
    monkeypatch.setattr(node, "SILENCE_S", 1.0)
    nodes = Nodes(2, 1, "127.0.0.1:1", 60, "secret")
    with closing(Node(replace(config, tensor_parallel=2, nodes=nodes), {}, hanging_store)) as made:
        until(lambda: made.has_joined)
        [rank] = made.ranks
        until(lambda: made.endings)
        assert made.endings == ["rank 1 does not answer"]
        assert not Path(f"/proc/{rank.pid}").exists()


@pytest.mark.processes
@pytest.mark.usefixtures("forked_ranks")
def test_a_start_that_cannot_be_sent(config: EngineConfig) -> None:
    before = open_files()
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        group.RankGroup(config, NativeFactory(), lambda publish: None, lambda error: None)
    assert open_files() == before
