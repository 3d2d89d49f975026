"""`loadout up` and `loadout demo` as they start, watch and end parts: small programs stand in for
the services. test_demo.py has the real ones, more of them in `make test-long`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from tests.support.up import Up

PART = """
import json, pathlib, signal, sys
name, ready = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
addresses = dict.fromkeys(("grpc", "metrics", "url"), "127.0.0.1:5")
partial = pathlib.Path(ready + ".partial")
partial.write_text(json.dumps(addresses))
partial.replace(ready)
signal.pause()
"""
LOADOUT = f"""
import os, sys
from loadout.cli.__main__ import main
from loadout.demo.system import System

def command_of(name):
    def command(system, *_):
        program = {PART!r}
        if name == os.environ.get("BROKEN"):
            program = "print('cannot open its data'); raise SystemExit(3)"
        return [sys.executable, "-c", program, name, str(system._ready_file(name))]
    return command

for name, method in {{
    "s3": "_s3_command", "store": "store_command", "inference": "inference_command"
}}.items():
    setattr(System, method, command_of(name))
sys.exit(main())
"""
"""The command line, with programs in place of the services; that of $BROKEN fails to start."""


@pytest.fixture
def up(tmp_path, start_up: Callable[..., Up]) -> Up:
    flags = ("--model", str(tmp_path), "--work-dir", "work")
    return start_up(*flags, cwd=tmp_path, program=("-c", LOADOUT))


@pytest.fixture
def parts(up) -> dict[str, int]:
    """The process of each part."""
    return {part.cmdline()[-2]: part.pid for part in psutil.Process(up.popen.pid).children()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_part(up, parts, number):
    assert parts.keys() == {"store", "inference"}
    assert up.end(number) == (0, "stopping\n")
    assert not any(psutil.pid_exists(pid) for pid in parts.values())


@pytest.mark.parametrize("victim", ["store", "inference"])
def test_up_ends_when_a_part_dies(up, parts, victim):
    os.kill(parts[victim], signal.SIGKILL)
    _, stderr = up.popen.communicate(timeout=90)
    assert up.popen.returncode == 1
    assert stderr.startswith(f"loadout: {victim} ended with exit code -9")
    assert not any(psutil.pid_exists(pid) for pid in parts.values())


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_demo_says_which_part_died(tmp_path):
    before = children()
    done = subprocess.run(
        [sys.executable, "-c", LOADOUT, "demo", "--work-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "BROKEN": "store"},
    )
    assert done.returncode == 1
    assert "loadout: store ended with exit code 3" in done.stderr
    assert f"the end of {tmp_path}/store.log:\n  cannot open its data" in done.stderr
    assert "Traceback" not in done.stderr
    assert children() == before
