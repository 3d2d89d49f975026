"""The whole system: real processes, real S3 server, real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loadout import Client
from loadout.demo.jobs import ADAPTER_JOBS, JOBS

pytestmark = pytest.mark.slow


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_demo_with_fewer_requests(tmp_path):
    before = children()
    command = [
        sys.executable,
        "-m",
        "loadout.cli",
        "demo",
        "--requests",
        "90",
        "--work-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(job.title in done.stdout for job in JOBS)
    rates = next(line for line in done.stdout.splitlines() if line.startswith("hit rates: "))
    assert "no look-ups" not in rates.replace("store disk no look-ups", "")
    assert "all services exited with 0" in done.stdout
    assert children() == before


def test_demo_says_which_part_died(tmp_path):
    """Something that is not a folder lies where the store keeps its data."""
    (tmp_path / "store").write_text("in the way")
    before = children()
    command = [
        sys.executable,
        "-m",
        "loadout.cli",
        "demo",
        "--requests",
        "9",
        "--work-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "loadout: store ended with exit code" in done.stderr
    assert f"the end of {tmp_path}/store.log" in done.stderr
    assert "Traceback" not in done.stderr.partition("the end of")[0]
    assert children() == before


def run_command(words: list[str], cwd: Path) -> str:
    assert words[0] == "loadout"
    command = [sys.executable, "-m", "loadout.cli", *words[1:]]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_up_prints_three_commands_that_work(tmp_path, start_up):
    up = start_up("--work-dir", "work", cwd=tmp_path)
    adapters, generate, top = up.commands
    listing = run_command(adapters, tmp_path)
    assert all(f"default/{job.name}@1" in listing for job in ADAPTER_JOBS)
    assert run_command(generate, tmp_path) == "tuodaol\n"
    assert "loadout-demo" in run_command([*top, "--once"], tmp_path)

    with Client(inference=up.addresses["inference"], store=up.addresses["store"]) as client:
        assert {adapter.name for adapter in client.list(page_size=3)} == {
            f"default/{job.name}" for job in ADAPTER_JOBS
        }
        loaded = client.load("upper", pin=True)
        assert loaded in client.residents()
        assert client.complete("abc=", adapter="upper", temperature=0).text == "ABC"
        client.unpin_resident("upper")
        assert client.unload("upper") > 0
        assert client.server_info().base_model == "loadout-demo"
        assert client.store_status().adapters == len(ADAPTER_JOBS)

    before = children()
    code, stderr = up.end(signal.SIGTERM)
    assert (code, stderr) == (0, "stopping\n")
    assert not any(psutil.pid_exists(pid) for pid in before)


def test_up_again_on_the_same_work_dir(tmp_path, start_up):
    code, _ = start_up("--work-dir", "work", cwd=tmp_path).end(signal.SIGINT)
    assert code == 0
    up = start_up("--work-dir", "work", cwd=tmp_path)
    with Client(store=up.addresses["store"]) as client:
        assert {adapter.version for adapter in client.list()} == {1}


def test_up_ends_when_a_part_dies(tmp_path, start_up):
    up = start_up("--work-dir", "work", cwd=tmp_path)
    victim = next(
        child
        for child in psutil.Process(up.popen.pid).children()
        if "inference_svc" in child.cmdline()
    )
    before = children()
    os.kill(victim.pid, signal.SIGKILL)
    _, stderr = up.popen.communicate(timeout=90)
    assert up.popen.returncode == 1
    assert stderr.startswith("loadout: inference ended with exit code -9")
    assert not any(psutil.pid_exists(pid) for pid in before)
