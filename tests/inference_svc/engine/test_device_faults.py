"""A device that fails: in a step, at start, when it wakes up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_svc.backends.torch import TorchFactory
from inference_svc.core import EngineConfig, Request, SamplingParams
from inference_svc.engine.transport.messages import Call, Command, StepOutputs, Submit
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import CannotWake, DeviceFault, EngineFailed
from inference_svc.store.client import NoStore
from tests.support.inference.stepped import Engine, faulty_engine, requests, tokens_of

ECC = "CUDA error: uncorrectable ECC error encountered"
ENDED_S = 60.0


# --- in a step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [ECC, "Triton Error [CUDA]: an illegal memory access", ""])
def test_a_broken_device_is_not_asked_again(make: Callable[[], Engine], text: str) -> None:
    """But for an error without a name, whose rows are looked at one by one."""
    calls = []

    def broken(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError(text)

    engine = faulty_engine(make, broken)
    with pytest.raises(RuntimeError):
        engine.run(requests())
    assert (len(calls) == 1) is bool(text)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    ],
)
def test_memory_that_runs_out_by_any_name_makes_steps_smaller(
    make: Callable[[], Engine], text: str
) -> None:
    def scarce(inputs: Any, logits: Any) -> None:
        if len(inputs.token_ids) > 10:
            raise RuntimeError(text)

    engine = faulty_engine(make, scarce)
    assert tokens_of(engine.run(requests())) == tokens_of(make().run(requests()))
    assert engine.limit.num_out_of_memory > 0
    assert engine.engine.commands.describe().counters["faulty_requests"] == 0


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        folder,
        "model",
        max_model_len=64,
        kv_bytes=1 << 19,
        arena_bytes=1 << 20,
        native_kernels=False,
        num_threads=1,
    )


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_an_engine_says_which_fault_has_ended_it(
    model_folder: Path, threads: None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineThread(config_of(model_folder), NoStore())
    found: list[StepOutputs] = []
    ended = threading.Event()

    def on_outputs(step: StepOutputs) -> None:
        found.append(step)
        if step.failure is not None:
            ended.set()

    def broken(*_: Any) -> None:
        raise RuntimeError(ECC)

    backend: Any = engine.built.engine.runner.backend
    backend.forward = broken
    engine.start(on_outputs)
    engine.send(Submit(Request("r", (1, 2), SamplingParams())))
    assert ended.wait(ENDED_S)
    engine.stop()
    failure = found[-1].failure
    assert failure is not None
    assert failure.fault is DeviceFault.HARDWARE
    assert found[-1].outputs[-1].error is failure
    [record] = [each for each in caplog.records if "nvidia-smi -r" in each.message]
    assert record.__dict__["fault"] == "hardware"
    assert record.exc_info is not None


# --- at start, and when it wakes up ---------------------------------------------------------------


def test_a_start_names_the_fault(
    model_folder: Path, threads: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def build(*_: Any) -> None:
        raise RuntimeError("CUDA error: no CUDA-capable device is detected")

    monkeypatch.setattr(TorchFactory, "build", build)
    with pytest.raises(EngineFailed, match="the engine cannot start: the device has vanished") as e:
        EngineThread(config_of(model_folder), NoStore())
    assert e.value.fault is DeviceFault.LOST
    assert "nvidia-smi -r" in e.value.message
    assert [each.__dict__["fault"] for each in caplog.records if "fault" in each.__dict__] == [
        "lost"
    ]


def test_other_errors_of_a_start_stay_what_they_are(
    model_folder: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(TorchFactory, "build", build)
    with pytest.raises(RuntimeError, match="mat1"):
        EngineThread(config_of(model_folder), NoStore())


@pytest.mark.parametrize(
    ("text", "is_broken"),
    [(ECC, True), ("CUDA error: out of memory", False), ("another error", False)],
)
def test_waking_up_a_broken_device_ends_the_engine(
    make: Callable[[], Engine], text: str, is_broken: bool, caplog: Any
) -> None:
    """Asleep it would answer for ever, and never serve again. Without memory it may be woken
    later."""
    engine = make().engine
    engine.step([Call(1, Command.SLEEP)])
    posted: list[Any] = []
    done = threading.Event()
    engine.life_cycle.post = lambda message: (posted.append(message), done.set())  # type: ignore

    def restore() -> None:
        raise RuntimeError(text)

    engine.runner.backend.restore = restore
    with caplog.at_level(logging.CRITICAL):
        engine.step([Call(2, Command.WAKE)])
        assert done.wait(ENDED_S)
    if is_broken:
        with pytest.raises(RuntimeError, match="ECC"):
            engine.step(posted)
        return
    outputs, _ = engine.step(posted)
    assert [(reply.call_id, type(reply.error)) for reply in outputs.replies] == [(2, CannotWake)]
    engine.check_integrity()
