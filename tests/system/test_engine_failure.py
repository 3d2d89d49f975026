"""A bug in a step answers every request and stops the engine; nothing hangs."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference_svc.core import EngineConfig
from inference_svc.engine.transport.messages import Call, Command, LayoutAccepted
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import EngineFailed
from tests.system.engines import CompilingStore, Running

OURS = ("loadout-engine", "loadout-pull")


def test_a_step_that_raises_answers_everybody(zoos: Any, monkeypatch: Any, caplog: Any) -> None:
    zoo = zoos("llama")
    config = EngineConfig(Path(), "llama", max_model_len=256, kv_bytes=4 << 20, num_threads=1)
    store = CompilingStore()
    digests = {"r16": store.register(zoo.adapter_dirs["r16"])}
    engine = EngineThread(replace(config, model_dir=zoo.model_dir), store)
    failures: list[Exception] = []
    running = Running(engine, store, digests)

    def on_outputs(step: Any) -> None:
        if step.failure is not None:
            failures.append(step.failure)
        running.on_outputs(step)

    engine.start(on_outputs)
    engine.send(LayoutAccepted(store.register_layout(engine.layout)))
    store.gate.clear()
    engine.send(Call(1, Command.PROFILE, limit=200, timeout_s=60.0))
    profiler = engine.built.engine.commands.profiler
    while (profiler.next_expiry_s() or 0.0) < time.monotonic() + 1:  # it gets ready
        time.sleep(0.001)
    running.submit("waits", [5], "r16")
    running.submit("runs", [5], max_tokens=200)
    running.until(lambda: "runs" in running.outputs)
    assert profiler.marks.is_on, "it is traced while it runs"

    def broken(batch: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.built.engine.runner, "run", broken)
    for request_id in ("runs", "waits"):
        assert isinstance(running.result(request_id)[1].error, EngineFailed)
    assert isinstance(running.replies[1].error, EngineFailed)
    assert len(failures) == 1
    engine.stop()
    assert not engine.is_alive
    assert not profiler.marks.is_on, "the trace has ended"
    assert not [t for t in threading.enumerate() if t.name.startswith(OURS)]
    assert "a bug" in caplog.text
