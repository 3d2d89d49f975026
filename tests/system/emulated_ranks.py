"""An engine of ranks whose kernels Triton's interpreter runs, as tests/support/kernels/worker.py
runs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_svc.core import EngineConfig
from inference_svc.engine.transport.messages import LayoutAccepted
from inference_svc.engine.transport.thread import EngineThread
from tests.support.gpu.emulated_ranks import emulated_ranks
from tests.system.emulated import Asked
from tests.system.engines import CompilingStore, Running, SavedStore
from tests.system.kinds import submit

MOST_EAGER = 4
"""Steps that are not replayed, beside the requests' prompts, at most."""


def generate(
    model_dir: Path,
    adapters: dict[str, Path],
    requests: Sequence[Asked],
    changes: dict[str, Any],
    saved: Path,
) -> list[list[int]]:
    """Returns the tokens of requests, which run together. Recorded steps are recorded when they
    first occur."""
    store = CompilingStore()
    digests = {name: store.register(folder) for name, folder in adapters.items()}
    config = EngineConfig(model_dir, "model", num_threads=1, **changes)
    with emulated_ranks():
        engine = EngineThread(config, store, SavedStore(saved))
        running = Running(engine, store, digests)
        engine.start(running.on_outputs)
        try:
            layouts = (engine.layout, *engine.other_layouts)
            accepted, *others = [store.register_layout(each) for each in layouts]
            store.save(saved)
            engine.send(LayoutAccepted(accepted, tuple(others)))
            for number, (adapter, prompt, count) in enumerate(requests):
                submit(running, str(number), prompt, adapter, max_tokens=count)
            found = []
            for number in range(len(requests)):
                running.until(lambda name=str(number): running.is_done(name), 600.0)
                tokens, last = running.result(str(number))
                assert last.error is None, last.error
                found.append(tokens)
            assert engine.built.engine.runner.backend.num_eager_steps < len(requests) + MOST_EAGER
            return found
        finally:
            engine.stop()
            engine.built.engine.check_integrity()


OPERATIONS = {"generate": generate}
