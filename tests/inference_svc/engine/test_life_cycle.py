"""Generation that pauses, and an engine that sleeps: what is held, refused, and said of it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference_svc.core import EngineConfig, FinishReason, Request, SamplingParams
from inference_svc.engine.build import BuiltEngine
from inference_svc.engine.control.life_cycle import Sleep
from inference_svc.engine.transport.messages import (
    Call,
    Command,
    Message,
    Output,
    PauseMode,
    Reply,
    StepOutputs,
    Submit,
)
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import Asleep, CannotWake, Interrupted, UnsupportedModel
from inference_svc.host.memory import resident_bytes
from inference_svc.store.client import NoStore
from tests.support.wait import until

PROMPT = tuple(range(3, 23))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Engine:
    """An engine whose steps are called by hand."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "max_model_len": 256,
            "max_sequences": 2,
            "max_batch_tokens": 64,
            "page_size": 4,
            "kv_bytes": 1 << 20,
            "arena_bytes": 1 << 20,
            "num_threads": 1,
        }
        config = EngineConfig(folder, "model", **(fields | changes))
        self.thread = EngineThread(config, NoStore())
        self.built: BuiltEngine = self.thread.built
        self.engine = self.built.engine
        self.outputs: dict[str, list[Output]] = {}
        self.replies: dict[int, Reply] = {}
        self.num_calls = 0

    def step(self, *messages: Message) -> None:
        outputs, _ = self.engine.step([*self.thread._messages(wait=False), *messages])
        self.engine.check_integrity()
        for output in outputs.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.replies |= {reply.call_id: reply for reply in outputs.replies}

    def start(self, command: Command, **fields: Any) -> int:
        self.num_calls += 1
        self.step(Call(self.num_calls, command, **fields))
        return self.num_calls

    def call(self, command: Command, **fields: Any) -> Any:
        """Returns the result, or raises the error, of a command."""
        number = self.start(command, **fields)
        until(lambda: number in self.replies or self.step())
        reply = self.replies.pop(number)
        if reply.error is not None:
            raise reply.error
        return reply.result

    def submit(self, name: str, count: int = 12) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.step(Submit(Request(name, PROMPT, sampling)))

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, ()) for token in output.token_ids]

    def finish(self) -> None:
        until(lambda: not self.engine.sequences or self.step())


@pytest.fixture(params=["native", "torch"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    made = Engine(folder, native_kernels=request.param == "native")
    yield made
    made.thread.stop()


def expected_of(engine: Engine, count: int = 12) -> list[int]:
    """What a request gives if nothing happens to it."""
    engine.submit("expected", count)
    engine.finish()
    return engine.tokens("expected")


# --- idle time ----------------------------------------------------------------------------------


def test_idle_time_is_used_until_a_message_comes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not while the engine sleeps: there are no pages to compute with."""
    pieces: list[int] = []

    def use_idle_time() -> bool:
        pieces.append(len(pieces))
        if pieces == [0, 1, 2]:
            engine.thread.send(Call(99, Command.PAUSE))
        return True

    monkeypatch.setattr(engine.engine.runner.backend, "use_idle_time", use_idle_time)
    wait = engine.thread._messages
    found = [wait(wait=True) for _ in range(3)]
    assert found[:2] == [[], []], "expiries are looked at between two pieces"
    [message] = found[2]
    assert isinstance(message, Call)
    assert pieces == [0, 1, 2]
    pieces.clear()
    engine.thread.send(message)
    assert wait(wait=True) == [message]
    assert not pieces, "a message waits"
    engine.call(Command.SLEEP, frees_weights=False)
    assert not engine.engine.use_idle_time()
    assert not pieces


# --- pausing ------------------------------------------------------------------------------------


def test_what_is_paused_goes_on_where_it_was(engine: Engine) -> None:
    expected = expected_of(engine)
    engine.submit("a")
    for _ in range(4):
        engine.step()
    before = engine.tokens("a")
    assert engine.call(Command.PAUSE) == 1
    engine.submit("b")
    for _ in range(5):
        engine.step()
    assert engine.tokens("a") == before
    assert engine.tokens("b") == []
    assert engine.engine.life_cycle.state == "paused"
    num_preemptions = engine.engine.scheduler.num_preemptions
    engine.call(Command.RESUME)
    engine.finish()
    assert engine.tokens("a") == engine.tokens("b") == expected
    assert engine.engine.scheduler.num_preemptions == num_preemptions


def test_a_pause_may_wait_for_what_runs(engine: Engine) -> None:
    engine.submit("a")
    engine.step()
    number = engine.start(Command.PAUSE, pause_mode=PauseMode.WAIT)
    engine.submit("later")
    assert number not in engine.replies
    until(lambda: number in engine.replies or engine.step())
    assert len(engine.tokens("a")) == 12
    assert engine.replies[number].result == 1
    assert engine.tokens("later") == []
    engine.call(Command.RESUME)
    engine.finish()
    assert engine.tokens("later") == engine.tokens("a")


def test_a_pause_that_waits_is_told_of_a_resumption(engine: Engine) -> None:
    engine.submit("a", 100)
    engine.step()
    number = engine.start(Command.PAUSE, pause_mode=PauseMode.WAIT)
    engine.call(Command.RESUME)
    assert isinstance(engine.replies[number].error, Interrupted)
    engine.finish()
    assert len(engine.tokens("a")) == 100


def test_a_pause_may_end_everything(engine: Engine) -> None:
    for name in "abc":
        engine.submit(name, 100)
    assert engine.call(Command.PAUSE, pause_mode=PauseMode.ABORT) == 0
    assert {outputs[-1].finish_reason for outputs in engine.outputs.values()} == {
        FinishReason.ABORTED
    }
    assert engine.engine.scheduler.states.num_used == 0


def test_a_pause_ends_by_itself(engine: Engine) -> None:
    """If it is asked to: a trainer that dies must not hold its requests for ever."""
    engine.submit("a")
    engine.call(Command.PAUSE, timeout_s=0.05)
    assert engine.engine.next_expiry_s() is not None
    engine.finish()
    assert len(engine.tokens("a")) == 12
    assert engine.engine.life_cycle.state == "running"


def test_an_idle_engine_resumes_when_the_time_is_over(folder: Path) -> None:
    """Nobody sends it a message then."""
    made = Engine(folder)
    outputs: list[StepOutputs] = []
    made.thread.start(outputs.append)
    made.thread.send(Call(1, Command.PAUSE, timeout_s=0.1))
    until(lambda: any(each.replies for each in outputs))
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    made.thread.send(Submit(Request("a", PROMPT, sampling)))
    until(lambda: any(output.is_last for each in outputs for output in each.outputs))
    made.thread.stop()


def test_a_pause_waits_for_what_was_preempted(engine: Engine) -> None:
    engine.submit("a")
    engine.submit("b")
    engine.submit("later")
    engine.step()
    number = engine.start(Command.PAUSE, pause_mode=PauseMode.WAIT)
    scheduler = engine.engine.scheduler
    scheduler.preempt(scheduler.running[-1], 0.0)
    until(lambda: number in engine.replies or engine.step())
    assert len(engine.tokens("a")) == len(engine.tokens("b")) == 12
    assert engine.replies[number].result == 1
    assert engine.tokens("later") == []


def test_a_deadline_passes_while_generation_is_paused(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    engine.call(Command.PAUSE)
    engine.step(Submit(Request("a", PROMPT, sampling, deadline_s=1.0)))
    engine.step()
    assert engine.outputs["a"][-1].finish_reason is FinishReason.ABORTED


# --- sleeping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("frees_weights", [False, True])
def test_what_slept_gives_the_same_tokens(engine: Engine, frees_weights: bool) -> None:
    expected = expected_of(engine)
    engine.submit("a")
    for _ in range(4):
        engine.step()
    backend = engine.engine.runner.backend
    kv_bytes, weights_bytes = backend.kv_bytes, backend.weights_bytes
    freed_bytes = engine.call(Command.SLEEP, frees_weights=frees_weights)
    assert freed_bytes == kv_bytes + frees_weights * weights_bytes
    assert engine.call(Command.DESCRIBE).generation == "asleep"
    memory = engine.call(Command.DESCRIBE).memory
    assert memory["kv_pages"] == (0, 0)
    assert memory["weights"][1] == (0 if frees_weights else weights_bytes)
    assert engine.call(Command.SLEEP) == 0  # it sleeps already
    assert engine.call(Command.WAKE) > 0
    assert engine.call(Command.WAKE) == 0
    engine.submit("b")
    engine.finish()
    assert engine.tokens("a") == engine.tokens("b") == expected
    assert (backend.kv_bytes, backend.weights_bytes) == (kv_bytes, weights_bytes)


def test_what_sleeps_deeper_frees_the_rest(engine: Engine) -> None:
    engine.call(Command.SLEEP)
    weights_bytes = engine.engine.runner.backend.weights_bytes
    assert engine.call(Command.SLEEP, frees_weights=True) == weights_bytes > 0
    engine.call(Command.WAKE)
    assert engine.engine.runner.backend.weights_bytes == weights_bytes


def test_nothing_new_is_taken_while_it_sleeps(engine: Engine) -> None:
    engine.call(Command.SLEEP)
    engine.submit("a")
    error = engine.outputs["a"][-1].error
    assert isinstance(error, Asleep)
    assert error.retry_after_s > 0
    with pytest.raises(Asleep):
        engine.call(Command.LOAD, digest="sha256:any")


def test_what_is_resumed_in_its_sleep_runs_when_it_wakes(engine: Engine) -> None:
    engine.call(Command.SLEEP)
    engine.call(Command.PAUSE)
    engine.call(Command.RESUME)
    engine.call(Command.WAKE)
    engine.submit("a")
    engine.finish()
    assert len(engine.tokens("a")) == 12


def test_what_was_paused_is_paused_when_it_wakes(engine: Engine) -> None:
    engine.submit("a")
    engine.call(Command.PAUSE)
    engine.call(Command.SLEEP)
    engine.call(Command.WAKE)
    assert engine.engine.life_cycle.state == "paused"
    engine.call(Command.RESUME)
    engine.finish()
    assert len(engine.tokens("a")) == 12


@pytest.mark.slow
def test_the_process_has_less_memory_while_it_sleeps(folder: Path) -> None:
    """The system's count, not ours."""
    made = Engine(folder, kv_bytes=256 << 20)
    before = resident_bytes()
    freed_bytes = made.call(Command.SLEEP)
    assert freed_bytes >= 255 << 20
    assert before - resident_bytes() > 0.9 * freed_bytes
    made.call(Command.WAKE)
    made.submit("a")
    made.finish()
    assert len(made.tokens("a")) == 12
    made.thread.stop()


def test_it_does_not_wake_with_another_model(engine: Engine, folder: Path) -> None:
    expected = expected_of(engine)
    path = folder / "model.safetensors"
    engine.call(Command.SLEEP, frees_weights=True)
    kept = path.with_suffix(".kept")
    path.rename(kept)
    with pytest.raises(CannotWake, match="cannot be read"):
        engine.call(Command.WAKE)
    shutil.copyfile(kept, path)
    with pytest.raises(UnsupportedModel, match="has changed"):
        engine.call(Command.WAKE)
    assert engine.engine.life_cycle.sleep is Sleep.ASLEEP
    kept.replace(path)
    engine.call(Command.WAKE)
    engine.submit("a")
    engine.finish()
    assert engine.tokens("a") == expected


def test_it_answers_while_it_wakes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.call(Command.SLEEP)
    backend, gate = engine.engine.runner.backend, threading.Event()
    restore = backend.restore
    monkeypatch.setattr(backend, "restore", lambda: gate.wait() and restore())
    number = engine.start(Command.WAKE)
    assert engine.call(Command.DESCRIBE).generation == "asleep"
    with pytest.raises(Asleep, match="wakes up"):
        engine.call(Command.SLEEP)
    engine.submit("refused")
    assert isinstance(engine.outputs["refused"][-1].error, Asleep)
    gate.set()
    until(lambda: number in engine.replies or engine.step())
    assert engine.replies[number].error is None


def test_an_engine_that_ends_answers_those_that_wait(engine: Engine) -> None:
    engine.submit("a", 100)
    number = engine.start(Command.PAUSE, pause_mode=PauseMode.WAIT)
    replies = engine.engine.end_all(Asleep("over")).replies
    assert [reply.call_id for reply in replies] == [number]
