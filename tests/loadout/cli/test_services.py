"""`loadout store` and `loadout serve` become the real services, flags and signals included."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from loadout import Client
from tests.support import forks
from tests.support.wait import until

pytestmark = pytest.mark.processes

LOADOUT = (sys.executable, "-m", "loadout.cli")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LOADOUT, *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("command", "module"), [("store", "adapter_store"), ("serve", "inference_svc")]
)
def test_help_is_the_services(command, module):
    service = forks.run(module, "-h")
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == service.stdout


def test_store_takes_flags_and_signals(tmp_path):
    ready = tmp_path / "ready.json"
    flags = {
        "--listen": "127.0.0.1:0",
        "--metrics-listen": "127.0.0.1:0",
        "--data-dir": str(tmp_path / "data"),
        "--ready-file": str(ready),
    }
    switches = ["--allow-open-access", "--no-compile-ahead"]
    command = [*LOADOUT, "store", *switches, *(word for flag in flags.items() for word in flag)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as store:
        until(lambda: ready.exists() or store.poll() is not None)
        assert store.poll() is None, store.stderr.read()
        with Client(store=json.loads(ready.read_text())["grpc"]) as client:
            assert client.store_status().adapters == 0
        store.send_signal(signal.SIGTERM)
        _, log = store.communicate(timeout=60)
    assert store.returncode == 0, log


def test_unknown_flag():
    done = run("store", "--no-such-flag", "1")
    assert done.returncode == 2
    assert done.stderr == "loadout: --no-such-flag: there is no such flag; --help-all lists all\n"


def test_serve_without_a_model(tmp_path):
    done = forks.run(forks.CLI, "serve", "--model", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"loadout: --model: {tmp_path} has no config.json")
    assert forks.run(forks.CLI, "serve").stderr.startswith("loadout: --model: is required")
