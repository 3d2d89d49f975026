"""`python -m inference_svc` as its parents see it: a process with a tiny model, no store."""

import gc
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import LlamaConfig, LlamaForCausalLM

from inference_svc import __main__ as service
from inference_svc.api.grpc.convert import to_processor
from inference_svc.backends.speed_notes import native_notes, thread_notes
from inference_svc.host.cpus import find_processor, usable_cores, usable_cpus
from inference_svc.metrics.engine import ANSWER_SECONDS
from inference_svc.text.tokenizer import tokenizer_bytes
from kernels.native.build import processor_flags
from kernels.native.library import choose
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from loadout.prometheus import scrape as read_metrics
from servicekit import interpreter_gc
from tests.support import forks
from tests.support.native import native_library
from tests.support.wait import until

pytestmark = pytest.mark.processes

START_SECONDS = 60
ENDED = (
    "the engine of this server has ended (its process was ended by SIGKILL), and the server ends "
    "with it"
)
REQUESTS_INFO = "vllm:lora_requests_info"


@pytest.fixture(scope="module")
def model(tokenizers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizers["chars"].hf.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizers["chars"].vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def command(model: Path, *args: str) -> list[str]:
    ports = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    return [sys.executable, "-m", "inference_svc", "--model", str(model), *ports, *args]


class Process:
    """A service that is a fork, as its engine is. Other tests here start it as users do."""

    def __init__(self, model: Path, folder: Path, engine: str, grace_seconds: int) -> None:
        ready_file = folder / "ready.json"
        args = ["--ready-file", str(ready_file), "--num-threads", "1", "--kv-memory", "64MiB"]
        args += ["--engine", engine, "--http", "127.0.0.1:0"]
        args += ["--grace-seconds", str(grace_seconds)]
        self._has_engine = engine == "process"
        self._log = folder / "log"
        self.fork = forks.start("inference_svc", command(model, *args)[3:], self._log)
        until(lambda: ready_file.exists() or self.fork.poll() is not None, what="not ready in time")
        assert self.fork.poll() is None, self._log.read_text()
        addresses = json.loads(ready_file.read_text())
        self.address: str = addresses["grpc"]
        self.http_address: str = addresses["http"]
        self.warnings: list[str] = addresses.get("warnings", [])
        self.metrics_address: str = addresses["metrics"]

    @property
    def engines(self) -> list[psutil.Process]:
        """Its engine's process, if that is one."""
        return [psutil.Process(forks.engine_of(self.fork.pid))] if self._has_engine else []

    def log(self) -> str:
        """Returns what it has printed so far."""
        return self._log.read_text()

    def wait(self) -> str:
        """Returns what it has printed, once it has ended."""
        self.fork.wait(START_SECONDS)
        return self.log()


@contextmanager
def running(model: Path, folder: Path, engine: str, grace_seconds: int = 20) -> Iterator[Process]:
    process = Process(model, folder, engine, grace_seconds)
    try:
        yield process
    finally:
        process.fork.kill()
        process.fork.wait()


@pytest.fixture
def process(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    """With its engine in a process of its own, or in what the test asks for."""
    with running(model, tmp_path, getattr(request, "param", "process")) as process:
        yield process


@pytest.mark.parametrize("process", ["process", "thread"], indirect=True)
def test_sigterm_under_load_lets_every_accepted_request_end(process: Process) -> None:
    params = pb.SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    with grpc.insecure_channel(process.address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        calls = [
            stub.Generate(pb.GenerateRequest(text=f"the dog {i}", sampling=params))
            for i in range(8)
        ]
        firsts = [next(call) for call in calls]
        engines = process.engines
        for each in (process.fork, *engines):  # as a whole group or cgroup may be told
            each.send_signal(signal.SIGTERM)
        for first, call in zip(firsts, calls, strict=True):
            responses = [first, *call]
            assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
            assert sum(len(r.token_ids) for r in responses) == 300
    printed = process.wait()
    assert process.fork.returncode == 0
    assert "Traceback" not in printed
    assert not any(engine.is_running() for engine in engines)


@pytest.mark.parametrize("is_busy", [False, True])
def test_sigterm_ends_a_server_whose_engine_hangs_within_the_grace(
    model: Path, tmp_path: Path, is_busy: bool
) -> None:
    with running(model, tmp_path, "process", grace_seconds=6) as process:
        with grpc.insecure_channel(process.address) as channel:
            if is_busy:
                params = pb.SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
                request = pb.GenerateRequest(text="the dog", sampling=params)
                call = pb_grpc.InferenceServiceStub(channel).Generate(request)
                next(call)
            (engine,) = process.engines
            engine.suspend()
            start_s = time.monotonic()
            process.fork.send_signal(signal.SIGTERM)
            printed = process.wait()
        assert process.fork.returncode == 0, printed
        assert time.monotonic() - start_s < 6 + 2  # the interpreter's own end on a busy machine
        assert not engine.is_running()


def test_an_engine_that_is_killed_answers_everybody_and_ends_the_server(process: Process) -> None:
    params = pb.SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
    with grpc.insecure_channel(process.address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        calls = [
            stub.Generate(pb.GenerateRequest(text=f"the dog {i}", sampling=params))
            for i in range(4)
        ]
        for call in calls:
            next(call)
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        (engine,) = process.engines
        engine.kill()
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == f"{ENDED}: try again later, or another server"
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
    printed = process.wait()
    assert process.fork.returncode == 1
    assert printed.splitlines()[-1] == f"loadout: {ENDED}; its log has more"
    assert "Traceback" not in printed


def test_who_calls_again_and_again_while_it_ends_is_told_unavailable(process: Process) -> None:
    params = pb.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    ends: list[grpc.StatusCode] = []
    answered = threading.Semaphore(0)

    def call_until_refused(stub: pb_grpc.InferenceServiceStub) -> None:
        try:
            while True:
                list(stub.Generate(pb.GenerateRequest(text="the dog", sampling=params)))
                answered.release()
        except grpc.RpcError as error:
            ends.append(error.code())

    with grpc.insecure_channel(process.address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        threads = [threading.Thread(target=call_until_refused, args=(stub,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            assert answered.acquire(timeout=START_SECONDS)
        process.fork.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(START_SECONDS)
    assert ends == [grpc.StatusCode.UNAVAILABLE] * 6
    process.wait()
    assert process.fork.returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--listen", "192.0.2.1:1", "--allow-open-access"],
            "loadout: --listen: cannot listen on 192.0.2.1:1: ",
        ),
        (
            ["--listen", "0.0.0.0:0"],
            "loadout: --listen: 0.0.0.0:0 can be reached from other machines",
        ),
        (["--http", "0.0.0.0:0"], "loadout: --http: 0.0.0.0:0 can be reached from other machines"),
        (
            ["--http", "192.0.2.1:1", "--allow-open-access"],
            "loadout: --http: cannot listen on 192.0.2.1:1: ",
        ),
        (
            ["--policy-file", "nowhere.toml"],
            "loadout: [Errno 2] No such file or directory: 'nowhere",
        ),
        (["--kv-memory", "1KiB"], "loadout: --kv-memory holds 0 tokens"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(
    model: Path, args: list[str], message: str, monkeypatch: Any, capsys: Any
) -> None:
    """In this process, whose log, collector and environment stay. How it looks as processes of
    their own, a killed engine shows."""
    monkeypatch.setattr(service, "configure_logging", lambda *settings: None)
    monkeypatch.setattr(interpreter_gc, "resume", gc.enable)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert service.main(command(model, *args)[3:]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith(message)
    assert "Traceback" not in said


def test_files_of_the_model_are_checked_before_anything_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(service, "configure_logging", lambda *settings: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setitem(sys.modules, "inference_svc.app", None)
    assert service.main(command(folder)[3:]) == 1
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"loadout: {folder} has no tokenizer.json: put the tokenizer's files")


def test_tokenizer_that_its_library_cannot_load_ends_the_start_in_one_line(
    model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"model": {"type": "Another", "vocab": {"a": 0}}}')
    done = forks.run("inference_svc", *command(folder)[3:])
    assert done.returncode == 1
    assert f"loadout: cannot load the tokenizer in {folder}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_engine_that_is_killed_while_it_loads_ends_the_start_in_one_line(model: Path) -> None:
    """The kernel kills it so when memory is short."""
    with subprocess.Popen(command(model), stderr=subprocess.PIPE, text=True) as popen:
        us = psutil.Process(popen.pid)
        until(us.children, what="no child in time")[0].kill()
        _, stderr = popen.communicate(timeout=START_SECONDS)
    assert popen.returncode == 1
    assert stderr.strip().splitlines()[-1] == "loadout: the engine's process was ended by SIGKILL"
    assert "Traceback" not in stderr


def test_a_memory_limit_that_does_not_suffice_shows_the_arithmetic(model: Path) -> None:
    limit = {"LOADOUT_INFERENCE_MEMORY_LIMIT": "600MiB"}
    done = forks.run("inference_svc", *command(model)[3:], environment=limit)
    assert done.returncode == 1
    assert "loadout: the host memory is too small" in done.stderr
    names = [line.split()[0] for line in done.stderr.splitlines() if line.startswith("  ")]
    areas = ["weights", "kv_pages", "arena", "workspace", "host_tier", "tokenizer", "process"]
    assert names == [*areas, "needed", "limit"]
    [tokenizer] = [line for line in done.stderr.splitlines() if line.startswith("  tokenizer")]
    assert int(tokenizer.split()[1].replace(",", "")) == tokenizer_bytes(model)


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """For tests that leave it as it was, and for the one that ends it."""
    with running(model, tmp_path_factory.mktemp("shared"), "process") as process:
        yield process


def test_every_byte_of_both_processes_is_somewhere(shared: Process) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        info = stub.GetServerInfo(pb.GetServerInfoRequest())
    memory = {use.name: use.capacity_bytes for use in info.memory}
    areas = {"weights", "kv_pages", "arena", "workspace", "host_tier", "process"}
    assert memory.keys() == areas | {"frontend"}
    assert memory["frontend"] > 100 << 20, "torch and gRPC are loaded there as well"
    resident_bytes = psutil.Process(shared.fork.pid).memory_info().rss
    assert abs(memory["frontend"] - resident_bytes) < 8 << 20
    (engine,) = shared.engines
    in_engine = sum(num_bytes for name, num_bytes in memory.items() if name != "frontend")
    assert abs(in_engine - engine.memory_info().rss) < 8 << 20
    assert info.limits.memory_bytes > sum(memory.values())
    assert info.kernels == f"native {native_library().variant}"


def test_notes_on_speed_are_everywhere(shared: Process) -> None:
    """In the log, in the ready file, which `loadout up` reads, and in the server's report."""
    with grpc.insecure_channel(shared.address) as channel:
        info = pb_grpc.InferenceServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
    assert info.num_threads == 1
    assert info.processor == to_processor(find_processor())
    assert f"1 thread computes on {find_processor()}" in shared.log()
    notes = native_notes(
        "float32", native_library().variant, processor_flags(), choose(None).faults
    )
    notes += thread_notes(1, usable_cores(), usable_cpus())
    assert list(info.speed_notes) == notes
    assert shared.warnings == notes
    logged = shared.log()
    assert [logged.count(note) for note in notes] == [1] * len(notes)


def test_an_engine_that_hangs_is_told_by_its_age_and_trusted_no_more(shared: Process) -> None:
    """Nothing else would show it: its counts stand still, and it is as it last said."""

    def scrape() -> tuple[float, float]:
        """How old what it shows is, and when routers are told that it was so."""
        found = read_metrics(shared.metrics_address)
        return found.one("loadout_inference_snapshot_age_seconds"), found.one(REQUESTS_INFO)

    (engine,) = shared.engines
    age_s, time_s = scrape()
    assert age_s < ANSWER_SECONDS
    assert time_s == pytest.approx(time.time(), abs=30)
    engine.suspend()
    with ThreadPoolExecutor(4) as scrapers:
        for age_s, later_s in scrapers.map(lambda _: scrape(), range(4)):
            assert age_s + 0.1 >= ANSWER_SECONDS
            assert later_s == time_s
    engine.resume()
    until(lambda: scrape()[0] < ANSWER_SECONDS)
    assert scrape()[1] > time_s + 1


def test_sigterm_lets_streams_over_http_end(shared: Process) -> None:
    client = openai.OpenAI(
        base_url=f"http://{shared.http_address}/v1", api_key="none", max_retries=0
    )
    fields: dict[str, Any] = {"max_tokens": 300, "temperature": 0, "stream": True}
    with client:
        streams = [
            client.completions.create(
                model="tiny", prompt=f"the dog {i}", extra_body={"ignore_eos": True}, **fields
            )
            for i in range(8)
        ]
        for stream in streams:
            next(stream)
        shared.fork.send_signal(signal.SIGTERM)
        for stream in streams:
            *_, last = stream
            assert last.choices[0].finish_reason == "length"
    printed = shared.wait()
    assert shared.fork.returncode == 0
    assert "Traceback" not in printed
