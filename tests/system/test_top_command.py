"""`loadout top` in a pipe and on a terminal, of real services at work."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loadout.cli.__main__ import main
from tests.support.models.zoo import Zoo
from tests.system.services import Services


# Services of its own: what other tests do on the shared ones moves the busiest adapter elsewhere.
@pytest.fixture(scope="module")
def services(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    with Services(zoos("llama"), tmp_path_factory.mktemp("services")) as made:
        yield made
        made.check_exit_codes()


@pytest.fixture
def arguments(services: Services) -> Iterator[list[str]]:
    """A command on services that generate with an adapter until it ends."""
    services.client.register("topmost", services.source("r16"))
    services.client.complete("warm", adapter="topmost", max_tokens=2, timeout_s=60)
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            services.client.complete("busy", adapter="topmost", max_tokens=8, ignore_eos=True)

    thread = threading.Thread(target=generate)
    thread.start()
    places = ("--inference", services.inference_address, "--store", services.store_address)
    yield ["top", *places, "--interval", "1"]
    stop.set()
    thread.join()


def test_one_view_in_a_pipe(arguments: list[str], capfd: Any) -> None:
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for text in (
        " tokens/s",
        "first token",
        "device",
        "replicas 1 of 1 healthy",
        "loads",
        "revision",
    ):
        assert text in out
    [busy] = [line.split() for line in out.splitlines() if "default/topmost " in line]
    tokens_per_second = busy[busy.index("device") + 6]
    assert float(tokens_per_second.replace(",", "")) > 0


def test_json(arguments: list[str], capfd: Any) -> None:
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["traffic"]["adapters"]["default/topmost"]["tokens_per_second"] > 0
    assert found["traffic"]["rates"]["tokens_per_second"] > 0
    assert found["traffic"]["latencies"]["inter_token_seconds"]["p99"] > 0
    assert "device" in found["traffic"]["tiers"]
    assert found["server"]["base_model"] == "llama"
    assert found["store"]["adapters"] >= 1


def test_a_terminal_that_is_resized(arguments: list[str]) -> None:
    terminal, end = pty.openpty()

    def resize(columns: int, rows: int) -> None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(is_found: Callable[[str], bool]) -> None:
        seen, deadline_s = b"", time.monotonic() + 120
        while not is_found(seen.decode(errors="replace")):
            ready, _, _ = select.select([terminal], [], [], deadline_s - time.monotonic())
            assert ready, seen[-2000:]
            assert time.monotonic() < deadline_s, seen[-2000:]
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                pytest.fail(f"not found in {seen[-2000:]!r}")

    def is_low(seen: str) -> bool:
        """Whether a frame has the lines of the smaller terminal."""
        frames = seen.split("\x1b[H")[1:-1]
        return any(len(frame.splitlines()) == 24 and "adapters" in frame for frame in frames)

    resize(150, 50)
    command = [sys.executable, "-m", "loadout.cli", *arguments, "--interval", "0.2"]
    # Rich prefers these to the terminal's own size.
    sizes = ("COLUMNS", "LINES")
    inherited = {name: value for name, value in os.environ.items() if name not in sizes}
    environment = {**inherited, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, env=environment, stdin=end, stdout=end, stderr=end)
    os.close(end)
    try:
        read_until(lambda seen: "\x1b[?1049h" in seen and "adapter tiers" in seen)
        read_until(lambda seen: "tokens/s" in seen)
        resize(80, 24)
        read_until(is_low)
        process.send_signal(signal.SIGINT)
        read_until(lambda seen: "\x1b[?1049l" in seen)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
