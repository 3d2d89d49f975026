"""`loadout up` and `loadout demo` as they start, watch and end parts: small programs stand in for
the services. test_demo.py has the real ones, more of them in `make test-long`."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from adapter_store.config import StoreSettings
from loadout.cli.__main__ import main
from loadout.demo.system import System, SystemSettings
from servicekit.settings.load import load_settings
from tests.support import forks
from tests.support.servers.hub_server import HUB_VARIABLES, HubServer, Repo
from tests.support.up import Up

ROOT = Path(__file__).parents[3]
PART = """
import json, os, pathlib, signal, sys
name, ready = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
addresses = dict.fromkeys(("grpc", "metrics", "url"), "127.0.0.1:5")
if warning := os.environ.get(f"{name.upper()}_SAYS"):
    addresses["warnings"] = [warning]
partial = pathlib.Path(ready + ".partial")
partial.write_text(json.dumps(addresses))
partial.replace(ready)
signal.pause()
"""
STAND_INS = f"""
import os, sys
from loadout.cli.__main__ import main
from loadout.demo.system import System, SystemSettings
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
"""
LOADOUT = f"{STAND_INS}sys.exit(main())"
"""The command line, with programs in place of the services; that of $BROKEN fails to start."""
FORKED_DOWNLOADS = f"""{STAND_INS}
from tests.support import forks
with forks.forked_downloads():
    sys.exit(main())
"""
"""The same, where a download is a fork."""


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


def test_up_prints_the_warnings_of_both_services(tmp_path, start_up, monkeypatch):
    monkeypatch.setenv("STORE_SAYS", "a variable is misspelled")
    monkeypatch.setenv("INFERENCE_SAYS", "this processor is slow")
    flags = ("--model", str(tmp_path), "--work-dir", "work")
    _, stderr = start_up(*flags, cwd=tmp_path, program=("-c", LOADOUT)).end(signal.SIGINT)
    assert stderr.splitlines() == [
        "loadout: a variable is misspelled",
        "loadout: this processor is slow",
        "stopping",
    ]


def test_up_ends_when_the_inference_service_dies(up, parts):
    os.kill(parts["inference"], signal.SIGKILL)
    _, stderr = up.popen.communicate(timeout=90)
    assert up.popen.returncode == 1
    assert stderr.startswith("loadout: inference was ended by SIGKILL")
    assert not any(psutil.pid_exists(pid) for pid in parts.values())


def test_up_goes_on_when_the_store_dies(up, parts, tmp_path):
    """It says how to start the store again where it was."""
    os.kill(parts["store"], signal.SIGKILL)
    lines = []
    for line in up.popen.stderr:
        lines.append(line)
        if line.startswith("  loadout store "):
            break
    assert lines[0].startswith("loadout: store was ended by SIGKILL")
    assert "The inference service continues" in "".join(lines)
    words = shlex.split(lines[-1])
    settings = load_settings(StoreSettings, words[2:])
    assert (settings.listen, settings.metrics_listen) == ("127.0.0.1:5", "127.0.0.1:5")
    assert settings.data_dir == tmp_path / "work" / "store"
    assert tmp_path / "work" / "sources" in settings.source_roots
    assert psutil.pid_exists(parts["inference"])
    assert up.end(signal.SIGINT) == (0, "stopping\n")
    assert not any(psutil.pid_exists(pid) for pid in parts.values())


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        (("--http", "{}"), "its HTTP API"),
        (("--store-flags", "--listen {}"), "the adapter store"),
        (("--serve-flags", "--metrics-listen={}"), "its metrics"),
    ],
)
def test_ports_are_checked_before_anything_starts(tmp_path, capsys, flag, what):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [word.format(address) for word in flag]
        folder = str(tmp_path / "work")
        assert main(["up", "--model", str(tmp_path), "--work-dir", folder, *flags]) == 1
    assert capsys.readouterr().err == (
        f"loadout: {what}: {address} is already in use; stop the program that uses it, or choose "
        "another port\n"
    )
    assert not list((tmp_path / "work").glob("*.log"))


def test_store_that_asks_for_tokens_and_a_service_without_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOADOUT_STORE_POLICY_FILE", "p.toml")
    folder = str(tmp_path / "work")
    assert main(["up", "--model", str(tmp_path), "--work-dir", folder]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "loadout: with the store's policy p.toml, the inference service needs a token"
    )
    assert "--store-token-file FILE" in line
    assert not list((tmp_path / "work").glob("*.log"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """One with a model, which programs find by their environment."""
    server = HubServer()
    server.repos["team/tiny"] = repo = Repo()
    config = b'{"architectures": ["LlamaForCausalLM"]}'
    vocabulary = b'{"model": {"vocab": {"a": 0}}}'
    weights = {"model.safetensors": bytes(5000)}
    repo.commit({"config.json": config, "tokenizer.json": vocabulary} | weights)
    for name in HUB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment(tmp_path / "hub").items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_up_downloads_a_model_by_its_name(hub, tmp_path, monkeypatch, start_up, way):
    flags = ["--model", "team/tiny"] if way == "flag" else []
    if not flags:
        monkeypatch.setenv("LOADOUT_INFERENCE_MODEL", "team/tiny")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(forks.ADDRESS, forks.address())
    up = start_up(*flags, "--work-dir", "work", cwd=tmp_path, program=("-c", FORKED_DOWNLOADS))
    _, stderr = up.end(signal.SIGINT)
    cache = tmp_path / "hub" / "hub"
    assert stderr == f"downloading team/tiny from {hub.url} into {cache}\nstopping\n"
    [snapshot] = cache.glob("models--team--tiny/snapshots/*")
    assert {path.name for path in snapshot.iterdir()} == set(
        hub.repos["team/tiny"].commits[snapshot.name]
    )


def test_up_without_its_model_starts_nothing(hub, tmp_path, capfd):
    work = tmp_path / "work"
    assert main(["up", "--model", "team/none", "--work-dir", str(work)]) == 1
    assert capfd.readouterr().err.splitlines()[1:] == [
        f"loadout: no folder team/none here, and there is no model team/none at {hub.url}, or it "
        "is private; for a private one run: hf auth login"
    ]
    assert not list(work.glob("*.log"))


def test_download_prints_the_folder(hub, tmp_path, capfd):
    with forks.forked_downloads():
        assert main(["download", "team/tiny"]) == 0
    folder = Path(capfd.readouterr().out.strip())
    assert folder.parent == tmp_path / "hub" / "hub" / "models--team--tiny" / "snapshots"
    assert (folder / "model.safetensors").stat().st_size == 5000


def test_sigterm_ends_a_download(hub, monkeypatch):
    """With the process that downloads, from a hub that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        command = [sys.executable, "-m", "loadout.cli", "download", "team/tiny"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
            silent.settimeout(60)
            connection, _ = silent.accept()
            [child] = psutil.Process(popen.pid).children()
            popen.terminate()
            _, stderr = popen.communicate(timeout=60)
        connection.close()
    assert (popen.returncode, len(stderr.splitlines())) == (130, 1), stderr
    assert not child.is_running()


def test_download_shows_its_progress_on_a_terminal(hub, tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [forks.programs() / "loadout", "download", "team/tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as popen:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # at its end
            while piece := os.read(ours, 1 << 16):
                shown += piece
        folder, _ = popen.communicate(timeout=60)
    os.close(ours)
    assert b"100%" in shown
    assert b"5.00kB" in shown
    assert Path(folder.strip()).is_dir()


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


def test_parts_on_one_machine_share_images():
    def socket_of(folder: str, **settings) -> list[str]:
        system = System(SystemSettings(Path("model"), **settings), Path(folder))
        words = [*system.store_command(""), *system.inference_command("127.0.0.1:1")]
        return [after for word, after in itertools.pairwise(words) if word.endswith("share-socket")]

    assert socket_of("/work") == ["/work/share.sock"] * 2
    assert socket_of("/work", store_flags=("--share-socket", "/given")) == ["/given"] * 2
    assert socket_of("/work", inference_flags=("--store", "other:1")) == ["/work/share.sock"]
    assert socket_of(f"/{'work' * 30}") == []  # no socket has such a path
