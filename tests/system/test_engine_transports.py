"""The engine keeps the same promises in a thread and in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inference_svc.core import EngineConfig, FinishReason
from inference_svc.engine.transport.messages import Command
from inference_svc.errors import AdapterNotFound, AdapterUnusable, DuplicateRequest, QueueFull
from inference_svc.results.base import of_kind
from inference_svc.results.logprobs import TokenLogprobs
from servicekit.errors import Draining
from tests.support import forks
from tests.support.models.zoo import Zoo
from tests.system.engines import Running
from tests.system.transports import set_gate, start_engine

PROMPT = [5, 6, 7, 8]
LONG = 200


@pytest.fixture(scope="module")
def zoo(zoos: Callable[[str], Zoo]) -> Zoo:
    return zoos("llama")


@pytest.fixture(scope="module", params=["thread", "process"])
def running(zoo: Zoo, request: pytest.FixtureRequest) -> Iterator[Running]:
    """One engine per kind for all tests; it ends by draining."""
    config = EngineConfig(
        zoo.model_dir,
        "llama",
        max_model_len=256,
        max_queue=4,
        max_sequences=12,
        kv_bytes=4 << 20,
        arena_bytes=4 << 20,
        num_threads=1,
    )
    with forks.forked_engines():
        made = start_engine(request.param, config, zoo.adapter_dirs)
        assert made.engine.is_alive
        yield made
        set_gate(made, False)
        made.submit("runs", PROMPT, max_tokens=LONG)
        made.submit("waits", PROMPT, "r64")
        made.until(lambda: "runs" in made.outputs)
        made.engine.stop()
        assert not made.engine.is_alive
        assert isinstance(made.result("waits")[1].error, Draining)
        made.engine.stop()


def idle(running: Running) -> None:
    """Asserts that nothing is held."""
    status = running.call(Command.DESCRIBE).result
    assert (status.num_running, status.num_waiting) == (0, 0)
    assert status.memory["kv_pages"][0] == 0


def test_any_mix_is_the_oracles(running: Running, zoo: Zoo) -> None:
    names = ["", *list(zoo.adapter_dirs)]
    for name in names:
        running.submit(f"mix {name}", PROMPT, name, max_tokens=12)
    for name in names:
        tokens, last = running.result(f"mix {name}")
        assert tokens == zoo.greedy(name, PROMPT, 12, guess=tokens), name or "base"
        assert last.finish_reason is FinishReason.LENGTH
        assert last.usage is not None
        assert last.usage.completion_tokens == 12
        assert last.timings is not None
    idle(running)


def test_tokens_come_one_by_one_with_their_logprobs(running: Running) -> None:
    running.submit("logprobs", PROMPT, max_tokens=5, logprobs=2)
    tokens, _last = running.result("logprobs")
    outputs = running.outputs["logprobs"]
    assert [output.token_ids for output in outputs] == [(token,) for token in tokens]
    for output in outputs:
        (found,) = of_kind(output.parts, TokenLogprobs)
        assert found.token_id == output.token_ids[0]
        assert found.top[0] == (found.token_id, found.logprob)


def test_cancelled_requests_end(running: Running) -> None:
    set_gate(running, False)
    running.call(Command.UNLOAD, "r33")
    running.submit("cancelled", PROMPT, max_tokens=LONG)
    running.submit("cancelled while waiting", PROMPT, "r33")
    running.until(lambda: "cancelled" in running.outputs)
    for request_id in ("cancelled", "cancelled while waiting"):
        running.cancel(request_id)
        assert running.result(request_id)[1].finish_reason is FinishReason.ABORTED
    set_gate(running, True)
    idle(running)


def test_a_deadline_ends_a_request(running: Running) -> None:
    running.submit("late", PROMPT, max_tokens=LONG, deadline_s=time.monotonic())
    assert running.result("late")[1].finish_reason is FinishReason.ABORTED
    idle(running)


def test_operators_load_pin_list_and_unload(running: Running) -> None:
    loaded = running.call(Command.LOAD, "r3", pin=True).result
    assert (loaded.rank, loaded.tier, loaded.pinned) == (3, "device", True)
    error = running.call(Command.UNLOAD, "r3").error
    assert isinstance(error, AdapterUnusable)
    assert error.subject == "ref"
    assert not running.call(Command.UNPIN, "r3").result.pinned
    assert running.digests["r3"] in {r.digest for r in running.call(Command.LIST_RESIDENT).result}
    assert running.call(Command.UNLOAD, "r3").result == loaded.num_bytes


def test_failing_loads_disturb_nobody(running: Running, zoo: Zoo) -> None:
    running.submit("good", PROMPT, "r16", max_tokens=40)
    for index in range(10):
        running.submit(f"bad {index}", PROMPT, f"sha256:{index}")
        error = running.result(f"bad {index}")[1].error
        assert isinstance(error, AdapterNotFound)
        assert error.subject == "digest"
    assert isinstance(running.call(Command.LOAD, "sha256:none").error, AdapterNotFound)
    tokens = running.result("good")[0]
    assert tokens == zoo.greedy("r16", PROMPT, 40, guess=tokens)
    assert running.call(Command.LOAD, "r8").result.rank == 8


def test_refusals_say_why_and_when_to_come_back(running: Running) -> None:
    running.submit("twice", PROMPT, max_tokens=LONG)
    running.submit("twice", PROMPT, max_tokens=LONG)
    running.until(lambda: any(o.error for o in running.outputs.get("twice", [])))
    error = next(o.error for o in running.outputs["twice"] if o.error)
    assert isinstance(error, DuplicateRequest)
    assert error.subject == "request_id"
    running.cancel("twice")
    names = [f"crowd {index}" for index in range(30)]
    for name in names:
        running.submit(name, PROMPT, max_tokens=2)
    ends = [running.result(name)[1] for name in names]
    refused = [end.error for end in ends if end.error is not None]
    assert refused, "12 run and 4 wait"
    for error in refused:
        assert isinstance(error, QueueFull)
        assert error.retry_after_s > 0


def test_the_metrics_of_the_engine_cross_the_door(running: Running) -> None:
    status: Any = running.call(Command.DESCRIBE).result
    assert status.counters["pulls"] > 0
    step, host, blocked = (
        status.histograms[f"step_{what}seconds"] for what in ("", "host_", "blocked_by_load_")
    )
    assert sum(step.counts) == sum(host.counts) == sum(blocked.counts) > 0
    assert 0 < host.sum_seconds < step.sum_seconds
    assert 0 < blocked.sum_seconds < step.sum_seconds
    assert set(status.memory) >= {"weights", "kv_pages", "arena"}
