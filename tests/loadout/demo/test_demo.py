"""The whole system: real processes, real S3 server, real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from loadout import Client, errors
from loadout.demo.adapters import ADAPTERS
from loadout.demo.jobs import ADAPTER_JOBS, JOBS
from loadout.types import EventKind

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
        "180",
        "--work-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(job.title in done.stdout for job in JOBS)
    rates = next(line for line in done.stdout.splitlines() if line.startswith("hit rates: "))
    assert "no lookups" not in rates.replace("store disk no lookups", "")
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


@pytest.fixture(scope="module")
def up(tmp_path_factory, start_up):
    """One system for all tests that leave it as it was."""
    flags = ("--http", "127.0.0.1:0", "--store-flags", "--no-compile-ahead --log-level WARNING")
    return start_up("--work-dir", "work", *flags, cwd=tmp_path_factory.mktemp("up"))


@pytest.fixture
def client(up):
    with Client(inference=up.addresses["inference"], store=up.addresses["store"]) as client:
        yield client


def test_up_prints_commands_that_work(up, tmp_path):
    adapters, generate, curl, top = up.commands
    listing = run_command(adapters, tmp_path)
    assert all(f"default/{job.name}@1" in listing for job in ADAPTER_JOBS)
    assert run_command(generate, tmp_path) == "tuodaol\n"
    assert "loadout-demo" in run_command([*top, "--once"], tmp_path)
    assert curl[0] == "curl"
    request = urllib.request.Request(
        curl[1], curl[-1].encode(), {"content-type": curl[curl.index("-H") + 1].split(": ")[1]}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["text"] == "tuodaol"


def test_client_against_the_real_services(client):
    names = {f"default/{job.name}" for job in ADAPTER_JOBS}
    assert {adapter.name for adapter in client.list("tenant=default", page_size=3)} == names
    assert client.server_info().base_model == "loadout-demo"

    first = client.register("acme/spare", ADAPTERS / "upper", labels={"team": "x"})
    [found] = client.list("label.team=x")
    assert found == client.get("acme/spare@1")
    loaded = client.load("acme/spare", pin=True)
    assert (loaded.digest, loaded.pinned) == (first.adapter.digest, True)
    assert loaded.digest in {resident.digest for resident in client.residents()}
    answer = client.complete("abc=", adapter="acme/spare", temperature=0)
    assert (answer.text, answer.adapter.name) == ("ABC", "acme/spare@1")
    assert not client.unpin_resident("acme/spare").pinned
    assert client.unload("acme/spare") == loaded.num_bytes

    second = client.register(
        "acme/spare", ADAPTERS / "reverse", if_current_digest=first.adapter.digest
    )
    assert second.adapter.version == 2
    answer = client.complete(
        "abc=", adapter="acme/spare", min_revision=second.revision, temperature=0
    )
    assert (answer.text, answer.adapter.name) == ("cba", "acme/spare@2")
    assert client.delete("acme/spare") > second.revision
    with client.watch(first.revision, timeout_s=20) as events:
        changes = [next(events) for _ in range(2)]
    assert [(each.kind, each.name) for each in changes] == [
        (EventKind.UPDATED, "acme/spare"),
        (EventKind.DELETED, "acme/spare"),
    ]


def test_errors_of_the_real_services(client):
    with pytest.raises(errors.NotFound, match="nobody") as caught:
        client.complete("abc=", adapter="nobody")
    assert caught.value.reason
    with pytest.raises(errors.InvalidArgument) as caught:
        client.complete("abc=", top_p=2.0)
    assert "top_p" in caught.value.subject
    with pytest.raises(errors.InvalidArgument):
        client.register("stray", "file:///etc")
    with pytest.raises(errors.Conflict):
        client.register("upper", ADAPTERS / "reverse", if_current_digest="sha256:" + "0" * 64)
    with pytest.raises(errors.FailedPrecondition):
        client.register("upper", ADAPTERS / "upper", expected_digest="sha256:" + "0" * 64)
    with pytest.raises(errors.NotFound):
        client.get("nobody@1")


def test_up_again_on_the_same_work_dir(tmp_path, start_up):
    first = start_up("--work-dir", "work", cwd=tmp_path)
    parts = {child.pid for child in psutil.Process(first.popen.pid).children()}
    assert first.end(signal.SIGTERM) == (0, "stopping\n")
    assert not any(psutil.pid_exists(pid) for pid in parts)
    second = start_up("--work-dir", "work", cwd=tmp_path)
    with Client(store=second.addresses["store"]) as client:
        assert {adapter.version for adapter in client.list()} == {1}


def test_up_ends_when_a_part_dies(tmp_path, start_up):
    up = start_up("--work-dir", "work", cwd=tmp_path)
    parts = psutil.Process(up.popen.pid).children()
    victim = next(part for part in parts if "inference_svc" in part.cmdline())
    os.kill(victim.pid, signal.SIGKILL)
    _, stderr = up.popen.communicate(timeout=90)
    assert up.popen.returncode == 1
    assert stderr.startswith("loadout: inference ended with exit code -9")
    assert not any(psutil.pid_exists(part.pid) for part in parts)
