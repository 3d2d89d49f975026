"""The whole system: real processes, real S3 server, real model."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from inference_svc.backends.speed_notes import thread_notes
from inference_svc.host.cpus import usable_cores, usable_cpus
from loadout import Client, errors
from loadout.demo.adapters import ADAPTERS
from loadout.demo.jobs import ADAPTER_JOBS, JOBS
from loadout.demo.run import MEMORY_FLAGS
from loadout.types import EventKind
from tests.support import forks
from tests.support.up import FORKED

pytestmark = pytest.mark.slow

NUM_THREADS = 1 if usable_cores() > 1 else 9
"""Another number than is fastest here."""


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the demo leaves behind is what `loadout up` then begins with."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder):
    """Its services are forks: `up` starts the real ones, and so does it in `make test-long`."""
    environment = {**os.environ, forks.ADDRESS: forks.address()}
    before = children()
    flags = ("--requests", "90", "--work-dir", str(folder / "work"))
    done = run_demo(*flags, program=FORKED, environment=environment)
    assert children() == before
    return done


def run_demo(
    *flags: str,
    program: tuple[str, ...] = ("-m", "loadout.cli"),
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, "demo", *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


def test_demo_with_fewer_requests(demo):
    check_demo(demo)


@pytest.mark.long
def test_demo_of_real_services():
    before = children()
    check_demo(run_demo("--requests", "90"))
    assert children() == before


def check_demo(demo: subprocess.CompletedProcess[str]) -> None:
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert all(job.title in demo.stdout for job in JOBS)
    rates = next(line for line in demo.stdout.splitlines() if line.startswith("hit rates: "))
    assert "no lookups" not in rates.replace("store disk no lookups", "")
    assert "all services exited with 0" in demo.stdout


@pytest.mark.long
def test_demo_says_which_part_died(tmp_path):
    """Something that is not a folder lies where the store keeps its data."""
    (tmp_path / "store").write_text("in the way")
    before = children()
    done = run_demo("--requests", "9", "--work-dir", str(tmp_path))
    assert done.returncode == 1
    assert "loadout: store ended with exit code" in done.stderr
    assert f"; see the log {tmp_path}/store.log" in done.stderr
    assert "Traceback" not in done.stderr
    assert children() == before


def run_command(words: list[str], cwd: Path) -> str:
    assert words[0] == "loadout"
    command = [forks.programs() / "loadout", *words[1:]]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def up(folder, demo, start_up):
    """One system for all tests that leave it as it was, on the work dir of one before it."""
    flags = ("--http", "127.0.0.1:0", "--store-flags", "--no-compile-ahead --log-level WARNING")
    serve = ("--serve-flags", shlex.join([*MEMORY_FLAGS, "--num-threads", str(NUM_THREADS)]))
    return start_up("--work-dir", "work", *flags, *serve, cwd=folder)


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


def test_up_says_what_would_be_faster(up, client):
    notes = client.server_info().speed_notes
    assert thread_notes(NUM_THREADS, usable_cores(), usable_cpus())[0] in notes
    lines = [*notes, "flags of the inference service, as above, go into --serve-flags"]
    assert [up.popen.stderr.readline() for _ in lines] == [f"loadout: {line}\n" for line in lines]


def test_adapters_outlast_a_system(client):
    """Adapters that an earlier demo on the same work dir registered are not registered again."""
    assert {adapter.version for adapter in client.list("tenant=default")} == {1}


def test_client_against_the_real_services(client):
    names = {f"default/{job.name}" for job in ADAPTER_JOBS}
    assert {adapter.name for adapter in client.list("tenant=default", page_size=3)} == names
    assert client.server_info().base_model == "loadout-demo"

    first = client.register("acme/spare", ADAPTERS / "upper", labels={"team": "x"})
    [found] = client.list("label.team=x")
    # Its content is there already, of another tenant: its image becomes ready between two calls.
    again = client.get("acme/spare@1")
    assert replace(found, layout_states=()) == replace(again, layout_states=())
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


@pytest.mark.long
def test_up_again_on_the_same_work_dir(tmp_path, start_up):
    first = start_up("--work-dir", "work", cwd=tmp_path)
    parts = {child.pid for child in psutil.Process(first.popen.pid).children()}
    assert first.end(signal.SIGTERM) == (0, "stopping\n")
    assert not any(psutil.pid_exists(pid) for pid in parts)
    second = start_up("--work-dir", "work", cwd=tmp_path)
    with Client(store=second.addresses["store"]) as client:
        assert {adapter.version for adapter in client.list()} == {1}


@pytest.mark.long
def test_up_ends_when_a_part_dies(tmp_path, start_up):
    up = start_up("--work-dir", "work", cwd=tmp_path)
    parts = psutil.Process(up.popen.pid).children()
    victim = next(part for part in parts if "inference_svc" in part.cmdline())
    os.kill(victim.pid, signal.SIGKILL)
    _, stderr = up.popen.communicate(timeout=90)
    assert up.popen.returncode == 1
    assert stderr.startswith("loadout: inference was ended by SIGKILL")
    assert not any(psutil.pid_exists(part.pid) for part in parts)
