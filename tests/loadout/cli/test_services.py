"""`loadout store` and `loadout serve` become the real services, flags and signals included."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from loadout import Client

LOADOUT = (sys.executable, "-m", "loadout.cli")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LOADOUT, *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("command", "service_flags"),
    [("store", ["--data-dir", "--s3-buckets"]), ("serve", ["--max-loras", "--adapter-memory"])],
)
def test_help_has_examples_and_the_services_flags(command, service_flags):
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    ours, service = done.stdout.split("The service's own flags:")
    assert "Examples:\n" in ours
    assert all(flag in service for flag in service_flags)


def test_store_takes_flags_and_signals(tmp_path):
    ready = tmp_path / "ready.json"
    flags = {
        "--listen": "127.0.0.1:0",
        "--metrics-listen": "127.0.0.1:0",
        "--data-dir": str(tmp_path / "data"),
        "--ready-file": str(ready),
    }
    command = [*LOADOUT, "store", *(word for flag in flags.items() for word in flag)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as store:
        while not ready.exists():
            assert store.poll() is None, store.stderr.read()
            time.sleep(0.05)
        with Client(store=json.loads(ready.read_text())["grpc"]) as client:
            assert client.store_status().adapters == 0
        store.send_signal(signal.SIGTERM)
        _, log = store.communicate(timeout=60)
    assert store.returncode == 0, log


def test_wrong_flag_of_a_service():
    done = run("store", "--no-such-flag", "1")
    assert done.returncode != 0
    assert "no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_without_a_model_there(tmp_path):
    done = run("serve", "--model", str(tmp_path))
    assert done.returncode != 0
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr
