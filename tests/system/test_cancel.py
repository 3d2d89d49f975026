"""Cancelled, expired or failed at any stage, a request leaves nothing behind."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from inference_svc.core import EngineConfig, FinishReason, Request, SamplingParams
from inference_svc.engine.transport.messages import Cancel, Submit
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import AdapterNotFound, AdapterUnavailable, QueueFull
from servicekit.errors import Draining
from tests.support.wait import until
from tests.system.engines import CompilingStore

LONG = 100
OURS = ("loadout-engine", "loadout-pull")


def snapshot(running: Any) -> tuple[Any, ...]:
    """What must be as before: pages, arena, rows, threads."""
    built = running.engine.built
    return (
        built.engine.scheduler.states.pages.pool.num_free,
        built.residency.device.used_bytes,
        0 if built.residency.host is None else built.residency.host.slots.used_bytes,
        len(built.residency.device),
        sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)),
    )


def cancel_and_check(running: Any, request_id: str, before: tuple[Any, ...]) -> None:
    running.cancel(request_id)
    _tokens, last = running.result(request_id)
    assert last.finish_reason is FinishReason.ABORTED
    running.check_idle()
    assert snapshot(running) == before


@pytest.mark.parametrize(
    ("stage", "changes", "num_prompt", "digest", "num_steps"),
    [
        ("queued", {"max_sequences": 1}, 5, "", 3),
        ("waiting for its adapter", {}, 5, "sha256:any", 3),
        ("prefilling", {"max_prefill_chunk": 1}, 90, "", 3),
        ("decoding", {}, 5, "", 3),
    ],
)
def test_the_turn_that_takes_a_cancel_frees_everything(
    zoos: Callable,
    stage: str,
    changes: dict[str, Any],
    num_prompt: int,
    digest: str,
    num_steps: int,
) -> None:
    """The same step answers, and computes nothing more of it. Steps are called by hand.
    sglang#36552, jundot/omlx#3013: wherever the request is."""
    config = EngineConfig(
        zoos("llama").model_dir, "llama", max_model_len=256, kv_bytes=4 << 20, num_threads=1
    )
    handle = EngineThread(replace(config, **changes), CompilingStore())
    engine = handle.built.engine
    greedy = SamplingParams(max_tokens=LONG, temperature=0.0, ignore_eos=True)
    requests = [Request("r", (5,) * num_prompt, greedy, digest, arrival_s=1.0)]
    if stage == "queued":
        requests.insert(0, Request("first", (6,) * 5, greedy))
    engine.step([Submit(request) for request in requests])
    for _ in range(num_steps):
        engine.step([])
    (sequence,) = [s for name, s in engine.sequences.items() if name == "r"]
    assert (sequence.num_computed > 0) == (stage in ("prefilling", "decoding"))
    assert (sequence.num_output > 0) == (stage == "decoding")
    computed, held = sequence.num_computed, len(sequence.page_ids)
    free = engine.scheduler.states.pages.pool.num_free

    said, _go_on = engine.step([Cancel("r")])
    (last,) = [output for output in said.outputs if output.request_id == "r"]
    assert last.finish_reason is FinishReason.ABORTED
    assert sequence.num_computed == computed
    assert engine.scheduler.states.pages.pool.num_free == free + held
    assert "r" not in engine.sequences
    engine.check_integrity()
    handle.stop()


def test_queued(start: Callable) -> None:
    """One sequence at a time: the second waits in the queue."""
    running = start(max_sequences=1)
    before = snapshot(running)
    running.submit("first", [5] * 9, max_tokens=LONG)
    running.submit("second", [6] * 9, max_tokens=LONG)
    running.cancel("second")
    assert running.result("second")[1].usage.completion_tokens == 0
    running.cancel("first")
    running.result("first")
    running.check_idle()
    assert snapshot(running) == before


@pytest.mark.parametrize("host_bytes", [0, 4 << 20])
def test_waiting_for_its_adapter(start: Callable, host_bytes: int) -> None:
    running = start(host_bytes=host_bytes)
    before = snapshot(running)
    running.store.gate.clear()
    running.submit("r", [5] * 9, "r16")
    residency = running.engine.built.residency
    until(lambda: residency.waiters and residency.loads.num_jobs)
    cancel_and_check(running, "r", before)
    running.store.gate.set()
    running.submit("again", [5] * 9, "r16", max_tokens=3)
    assert len(running.result("again")[0]) == 3


def test_loading_while_another_wants_it_too(start: Callable) -> None:
    """The load goes on for the one that still waits."""
    running = start()
    running.store.gate.clear()
    for request_id in ("one", "two"):
        running.submit(request_id, [5] * 9, "r16", max_tokens=3)
    running.cancel("one")
    assert running.result("one")[1].finish_reason is FinishReason.ABORTED
    running.store.gate.set()
    assert len(running.result("two")[0]) == 3


def test_prefilling(start: Callable) -> None:
    """One token per step: the prompt takes two hundred of them."""
    running = start(max_prefill_chunk=1)
    running.submit("warm", [9], "r16", max_tokens=1)
    running.result("warm")
    before = snapshot(running)
    running.submit("r", [5] * 200, "r16")
    built = running.engine.built
    until(lambda: built.engine.scheduler.running)
    cancel_and_check(running, "r", before)
    assert running.outputs["r"][-1].usage.completion_tokens == 0


def test_decoding(start: Callable) -> None:
    running = start()
    running.submit("warm", [9], "r16", max_tokens=1)
    running.result("warm")
    before = snapshot(running)
    running.submit("r", [5] * 9, "r16", max_tokens=200)
    running.until(lambda: len(running.outputs.get("r", [])) > 2)
    cancel_and_check(running, "r", before)


def test_preempted(start: Callable) -> None:
    running = start(kv_bytes=96 << 10, max_model_len=96)
    before = snapshot(running)
    with running.together():
        for index in range(4):
            running.submit(f"{index}", [5 + index] * 40, max_tokens=50)
    scheduler = running.engine.built.engine.scheduler
    until(lambda: scheduler.num_preemptions)
    for index in range(4):
        running.cancel(f"{index}")
    for index in range(4):
        running.result(f"{index}")
    running.check_idle()
    assert scheduler.num_preemptions > 0
    assert snapshot(running) == before


def test_a_deadline_ends_a_request_wherever_it_is(start: Callable) -> None:
    running = start()
    before = snapshot(running)
    running.store.gate.clear()
    running.submit("waits", [5], "r16", deadline_s=time.monotonic() + 0.1)
    running.submit("runs", [5], max_tokens=240, deadline_s=time.monotonic() + 0.02)
    for request_id in ("waits", "runs"):
        assert running.result(request_id)[1].finish_reason is FinishReason.ABORTED
    running.check_idle()
    assert snapshot(running) == before


def test_an_unreachable_store_is_waited_for_so_long_and_no_longer(start: Callable) -> None:
    running = start(adapter_wait_s=0.3)
    running.store.is_down = True
    began = time.monotonic()
    running.submit("adapter", [5], "r16")
    running.submit("base", [5], max_tokens=3)
    assert len(running.result("base")[0]) == 3
    error = running.result("adapter")[1].error
    assert isinstance(error, AdapterUnavailable)
    words = r"adapter acme/r16@3 was not loaded within 0.3 s: the store is down, for 0 s now; try"
    assert re.match(words, error.message)
    assert 0.3 <= time.monotonic() - began < 20
    running.check_idle()
    running.store.is_down = False
    running.submit("later", [5], "r16", max_tokens=3)
    assert len(running.result("later")[0]) == 3


def test_a_store_that_is_back_in_time_is_enough(start: Callable) -> None:
    running = start(adapter_wait_s=10.0)
    running.store.is_down = True
    running.submit("r", [5], "r16", max_tokens=3)
    until(lambda: running.store.num_failed)
    running.store.is_down = False
    assert len(running.result("r")[0]) == 3


def test_an_unknown_adapter_fails_at_once(start: Callable) -> None:
    running = start()
    before = snapshot(running)
    running.submit("r", [5], "sha256:unknown")
    assert isinstance(running.result("r")[1].error, AdapterNotFound)
    running.check_idle()
    assert snapshot(running) == before


def test_a_full_queue_answers_at_once(start: Callable) -> None:
    """One may run and two may wait; a burst onto an idle engine counts the place that is free."""
    running = start(max_sequences=1, max_queue=2)
    for index in range(8):
        running.submit(f"{index}", [5] * 9, max_tokens=30)
    last = [running.result(f"{index}")[1] for index in range(8)]
    refused = [output for output in last if isinstance(output.error, QueueFull)]
    assert len(refused) == 5
    assert all(output.error.retry_after_s > 0 for output in refused)
    running.check_idle()


def test_requests_that_wait_for_the_store_do_not_fill_the_queue(start: Callable) -> None:
    running = start(max_sequences=1, max_queue=1, adapter_wait_s=0.5)
    running.store.is_down = True
    for index in range(4):
        running.submit(f"a{index}", [5], "r16")
    running.submit("base", [5], max_tokens=3)
    assert len(running.result("base")[0]) == 3
    errors = [running.result(f"a{index}")[1].error for index in range(4)]
    assert [type(error) for error in errors].count(QueueFull) == 2


def test_stop_answers_everything(start: Callable) -> None:
    running = start(max_sequences=1)
    running.store.gate.clear()
    running.submit("runs", [5], max_tokens=240)
    running.submit("queued", [5], max_tokens=240)
    running.submit("waits", [5], "r16")
    running.until(lambda: "runs" in running.outputs)
    running.engine.stop()
    for request_id in ("runs", "queued", "waits"):
        assert isinstance(running.result(request_id)[1].error, Draining)
    running.check_idle()
    assert not [t for t in threading.enumerate() if t.name.startswith(OURS) and t.is_alive()]
