"""Child processes that start, die, hang and refuse to stop."""

from __future__ import annotations

import sys
import time

import pytest

from loadout.demo.process import Process, ProcessFailed

SERVE = """
import json, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({exit_code}))
print("serving")
ready = pathlib.Path(sys.argv[1])
partial = ready.with_suffix(".partial")
partial.write_text(json.dumps({{"grpc": "127.0.0.1:5"}}))
partial.replace(ready)
signal.pause()
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start(program: str) -> Process:
        ready = tmp_path / "part.ready.json"
        command = [sys.executable, "-u", "-c", program, str(ready)]
        started.append(Process("part", command, tmp_path, ready))
        return started[-1]

    yield start
    for process in started:
        process.stop(grace_s=0)


def test_ready_alive_stopped(start):
    part = start(SERVE.format(exit_code=0))
    assert part.wait_ready(60) == {"grpc": "127.0.0.1:5"}
    part.check_alive()
    assert part.stop(60) == 0
    assert part.failure_of(0) is None
    assert part.log_path.read_text() == "serving\n"


def test_death_before_ready_shows_the_log(start):
    part = start("print('line 1'); print('cannot bind'); raise SystemExit(3)")
    with pytest.raises(
        ProcessFailed, match=r"part ended with exit code 3; the end of .*part\.log"
    ) as caught:
        part.wait_ready(60)
    assert "\n  line 1\n  cannot bind" in str(caught.value)


def test_last_word_stands_for_the_log(start):
    part = start("print('Traceback'); print('loadout: the engine has ended'); raise SystemExit(1)")
    with pytest.raises(ProcessFailed) as caught:
        part.wait_ready(60)
    assert str(caught.value) == (
        f"part ended with exit code 1: the engine has ended; see the log {part.log_path}"
    )


def test_never_ready(start):
    part = start("import time; time.sleep(60)")
    with pytest.raises(ProcessFailed, match=r"part was not ready after 0 s.* empty"):
        part.wait_ready(0.3)


def test_death_while_running(start):
    part = start(SERVE.format(exit_code=0) + "\n")
    part.wait_ready(60)
    part.stop(60)
    with pytest.raises(ProcessFailed, match="ended with exit code 0"):
        part.check_alive()


def test_wrong_exit_code_is_a_failure(start):
    part = start(SERVE.format(exit_code=7))
    part.wait_ready(60)
    failure = part.failure_of(part.stop(60))
    assert "stopped with exit code 7 instead of 0" in str(failure)


def test_killed_when_the_grace_is_over(start):
    part = start(
        "import signal, pathlib, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).write_text('{}')\n"
        "time.sleep(60)\n"
    )
    part.wait_ready(60)
    started = time.monotonic()
    assert part.stop(0.2) == -9
    assert time.monotonic() - started < 30
