"""Real servers whose device fails: all that callers and operators learn of it, over both
transports."""

from __future__ import annotations

import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadout import Client, errors
from loadout.errors import Unavailable
from loadout.prometheus import scrape
from loadout.retry import RetryPolicy
from tests.inference_svc.engine.bad_device import FAULT
from tests.support.forks import ForkedProcess
from tests.support.wait import until

pytestmark = pytest.mark.processes

ECC = "CUDA error: uncorrectable ECC error encountered"
STARTED_S, ENDED_S = 120.0, 60.0


def free_port() -> int:
    """Returns a port that a server can find again after it has closed it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Server:
    """A server and its engine, which are forks; the device does what `fail` says from then on."""

    folder: Path
    model: Path
    fault: str = ""
    step_timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        self.folder.mkdir()
        if self.fault:
            self.fail(self.fault)
        settings = self.folder / "settings.toml"
        settings.write_text("native-kernels = false\n")
        ready = self.folder / "ready.json"
        self.metrics = f"127.0.0.1:{free_port()}"
        command = [
            *(sys.executable, "-m", "tests.inference_svc.engine.bad_device", str(self.folder)),
            *("--model", str(self.model), "--base-model", "base", "--no-tokenizer"),
            *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--kv-memory", "1MiB"),
            *("--metrics-listen", self.metrics, "--ready-file", str(ready)),
            *("--adapter-memory", "1MiB", "--host-memory", "1MiB", "--max-model-len", "64"),
            *("--config", str(settings), "--num-threads", "1"),
            *("--step-timeout-seconds", str(self.step_timeout_seconds)),
            *("--fault-hold-seconds", "600", "--log-format", "json"),
        ]
        self.process = ForkedProcess("server", command, self.folder, ready)

    def fail(self, fault: str) -> None:
        partial = self.folder / "next"
        partial.write_text(fault)
        partial.replace(self.folder / FAULT)

    def wait_ready(self) -> None:
        found = self.process.wait_ready(STARTED_S)
        self.grpc, self.http = found["grpc"], found["http"]

    def count(self, kind: str) -> float:
        return scrape(self.metrics).one("loadout_inference_device_faults_total", kind=kind)

    def log(self, fault: str) -> dict[str, Any]:
        """Returns the line that the server holds with."""
        lines = self.process.log_path.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        [line] = [each for each in found if "hold_seconds" in each]
        assert line["fault"] == fault
        return line

    def post(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            f"http://{self.http}{route}",
            json.dumps({"model": "base", **body}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ENDED_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def health(self) -> int:
        """Returns the status of HTTP's health check; 0: nothing listens."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/health", timeout=ENDED_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def holds(self) -> bool:
        """Whether all is closed but the metrics, which may open a moment after the line."""
        if '"hold_seconds"' not in self.process.log_path.read_text():
            return False
        with suppress(Unavailable):
            return bool(scrape(self.metrics))
        return False


@pytest.fixture
def start(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start_one(name: str, **fields: Any) -> Server:
        made.append(Server(tmp_path / name, model_folder, **fields))
        return made[-1]

    yield start_one
    for each in made:
        if each.process.is_alive:
            each.process.stop(ENDED_S)


def test_a_device_that_breaks_while_it_serves(start: Callable[..., Server]) -> None:
    """First it lacks memory, which costs nobody an answer; then it is damaged."""
    server = start("breaks")
    server.wait_ready()
    prompt = {"prompt": [3, 5, 7, 9, 11, 13], "max_tokens": 4, "temperature": 0}
    before = server.post("/v1/completions", prompt)
    assert before[0] == 200
    server.fail("scarce")
    after = server.post("/v1/completions", prompt | {"prompt": [3, 5, 7, 9, 11, 13]})
    assert after[0] == 200
    assert after[1]["choices"] == before[1]["choices"]
    assert scrape(server.metrics).one("loadout_inference_step_out_of_memory_total") > 0
    assert server.health() == 200
    assert server.count("hardware") == 0
    server.fail(ECC)
    client = Client(inference=server.grpc, retry=RetryPolicy(max_attempts=1))
    with client, pytest.raises(errors.Unavailable, match="uncorrectable ECC error") as caught:
        client.complete([1, 2, 3], max_tokens=4)
    assert caught.value.reason == "ENGINE_FAILED"
    assert "nvidia-smi" not in caught.value.message, "callers cannot do that"
    until(server.holds)
    assert server.count("hardware") == 1
    assert server.health() == 0
    line = server.log("hardware")
    assert "the device is damaged" in line["message"]
    assert "kubectl drain" in line["message"]
    assert server.process.stop(ENDED_S) == 1, "a supervisor restarts it"
    last = server.process.log_path.read_text().splitlines()[-1]
    assert last.startswith("loadout: the engine of this server has ended (a step failed: the dev")


def test_a_step_that_hangs_ends_the_engine(start: Callable[..., Server]) -> None:
    server = start("hangs", step_timeout_seconds=1)
    server.wait_ready()
    server.fail("hang")
    client = Client(inference=server.grpc, retry=RetryPolicy(max_attempts=1))
    with client, futures.ThreadPoolExecutor() as pool:
        over_grpc = pool.submit(client.complete, [1, 2, 3], max_tokens=4)
        over_http = pool.submit(server.post, "/v1/completions", {"prompt": [4, 5], "max_tokens": 4})
        until(lambda: server.health() in (0, 503))
        with pytest.raises(errors.Unavailable, match="has not answered for 1 s") as caught:
            over_grpc.result(ENDED_S)
        assert caught.value.reason == "ENGINE_FAILED"
        status, body = over_http.result(ENDED_S)
    assert (status, body["error"]["code"]) == (503, "engine_failed")
    until(server.holds)
    assert server.count("hung") == 1
    assert "nvidia-smi -r" in server.log("hung")["message"]
    log = server.process.log_path.read_text()
    assert "bad_device.py" in log, "where it hangs"
    assert server.process.stop(ENDED_S) == 1


def test_a_device_that_others_fill(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho '41, /opt/train.py, 81000 MiB'\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    server = start("full", fault="full")
    until(server.holds)
    assert server.count("memory") == 1
    message = server.log("memory")["message"]
    for words in ("and other programs use", "process 41: 81000 MiB, /opt/train.py"):
        assert words in message
    assert server.process.stop(ENDED_S) == 1
