"""Traces of live steps: of an engine in its thread, and of one in a process through the command."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inference_svc.engine.transport.messages import Abandon, Call, Command, Reply, StepTrace
from inference_svc.errors import NoSteps, ProfileRunning
from loadout import errors
from loadout.cli.__main__ import main
from servicekit.errors import Draining
from tests.system.engines import Running
from tests.system.services import Services

PARTS = ("prepare", "forward", "sample", "settle")


def profile(
    running: Running, number: int, num_steps: int, timeout_s: float = 30.0, rank: int = 0
) -> None:
    options: dict[str, Any] = {"limit": num_steps, "timeout_s": timeout_s, "rank": rank}
    running.engine.send(Call(number, Command.PROFILE, **options))


def reply_of(running: Running, number: int) -> Reply:
    running.until(lambda: number in running.replies)
    return running.replies.pop(number)


def names_in(trace: bytes) -> Counter[str]:
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("ph") == "X")


@contextmanager
def busy(running: Running) -> Iterator[None]:
    running.submit("busy", [5], max_tokens=200)
    yield
    running.cancel("busy")
    running.result("busy")


def test_a_trace_has_each_step_with_its_parts_and_operators(start: Callable[..., Running]) -> None:
    running = start()
    with busy(running):
        profile(running, 1, 4)
        profile(running, 2, 4)
        assert isinstance(reply_of(running, 2).error, ProfileRunning)
        found = reply_of(running, 1).result
    assert isinstance(found, StepTrace)
    assert found.num_steps == 4
    names = names_in(Path(found.path).read_bytes())
    assert Path(found.path).stat().st_mode & 0o077 == 0
    found.remove()
    assert [names[part] for part in PARTS] == [4] * 4
    assert names["step"] >= names["schedule"] >= 4  # steps without a batch count, too
    assert any(name.startswith("aten::") for name in names)
    running.check_idle()


@pytest.mark.parametrize("shape", ["tensor_parallel", "pipeline_parallel"])
def test_each_rank_can_be_traced(start: Callable[..., Running], shape: str) -> None:
    """By itself, one at a time; files are gone when the ranks have ended."""
    running = start(**{shape: 2})
    assert running.engine.built.ranks is not None
    [other] = running.engine.built.ranks.local
    profile(running, 1, 4, rank=2)
    assert "rank must be below 2" in str(reply_of(running, 1).error)
    profile(running, 2, 4, timeout_s=0.05, rank=1)
    assert isinstance(reply_of(running, 2).error, NoSteps)
    profile(running, 3, 4, rank=1)
    running.engine.send(Abandon(3))
    with busy(running):
        profile(running, 4, 4, rank=1)
        for rank in (0, 1):
            profile(running, 5 + rank, 4, rank=rank)
            assert isinstance(reply_of(running, 5 + rank).error, ProfileRunning)
        found = reply_of(running, 4).result
    assert 3 not in running.replies
    assert found.num_steps == 4
    trace = Path(found.path).read_bytes()
    assert Path(found.path).stat().st_mode & 0o077 == 0
    found.remove()
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    steps = [each for each in events if each.get("ph") == "X" and each["name"] == "step"]
    assert {each["pid"] for each in steps} == {other.pid}
    assert len(steps) >= 4
    assert any(name.startswith("aten::") for name in names_in(trace))
    profile(running, 7, 200, rank=1)
    running.engine.stop()
    assert isinstance(reply_of(running, 7).error, Draining)


def test_a_server_of_one_process_has_no_other_rank(start: Callable[..., Running]) -> None:
    running = start()
    profile(running, 1, 4, rank=1)
    assert "rank must be 0: the server has one process" in str(reply_of(running, 1).error)


def test_a_trace_ends_when_its_time_is_over(start: Callable[..., Running]) -> None:
    running = start()
    profile(running, 1, 4, timeout_s=0.05)
    assert isinstance(reply_of(running, 1).error, NoSteps)
    with busy(running):
        timeout_s, reply = 0.1, Reply(2, error=NoSteps("not yet"))
        while isinstance(reply.error, NoSteps):  # as on a machine that is busy
            profile(running, 2, 200, timeout_s=timeout_s)
            timeout_s, reply = 2 * timeout_s, reply_of(running, 2)
    found = reply.result
    assert 0 < found.num_steps < 200
    found.remove()


def test_who_leaves_ends_it_and_the_next_may_trace(start: Callable[..., Running]) -> None:
    running = start()
    profile(running, 1, 4)
    running.engine.send(Abandon(1))
    with busy(running):
        profile(running, 2, 2)
        reply_of(running, 2).result.remove()
    assert 1 not in running.replies
    profile(running, 3, 4)
    running.engine.stop()
    assert isinstance(reply_of(running, 3).error, Draining)


def reason_of_no_trace(services: Services) -> str:
    with pytest.raises((errors.FailedPrecondition, errors.DeadlineExceeded)) as caught:
        list(services.client.profile(1, wait_s=0.01))
    return caught.value.reason


def test_the_command_traces_an_engine_in_its_process(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("LOADOUT_INFERENCE", services.inference_address)
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            services.client.complete("busy", max_tokens=32, ignore_eos=True, timeout_s=60)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        out = tmp_path / "trace.json.gz"
        assert main(["profile", "--steps", "3", "--out", str(out)]) == 0
        assert "3 steps" in capfd.readouterr().out
        names = names_in(out.read_bytes())
        assert [names[part] for part in PARTS] == [3] * 4
    finally:
        stop.set()
        thread.join()
    waiting = services.client.profile(1, wait_s=60)
    started_s = time.monotonic()
    while reason_of_no_trace(services) != "PROFILE_RUNNING":  # the first one has not arrived yet
        assert time.monotonic() < started_s + 30
    waiting.close()
    while reason_of_no_trace(services) != "NO_STEPS":
        assert time.monotonic() < started_s + 60
    assert main(["profile", "--wait", "0.1", "--out", str(tmp_path / "none")]) == 1
    said = "no step ran in this time: send requests meanwhile (NO_STEPS)"
    assert capfd.readouterr().err == f"loadout: {said}\n"
    assert not list(tmp_path.glob("*none*"))
    with pytest.raises(errors.InvalidArgument, match="num_steps must be from 1 to 200"):
        list(services.client.profile(201))
