"""The engine behind either of its doors, over the adapter store without a wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc.config import EngineConfig
from inference_svc.engine.messages import LayoutAccepted, StoreMessage
from inference_svc.engine.process import EngineProcess
from inference_svc.engine.thread import EngineThread
from tests.system.engines import CompilingStore, Running


class ChildCompilingStore(CompilingStore):
    """In the engine's process; news says whether its gate is open."""

    def hear(self, news: Any) -> None:
        if isinstance(news, bool):
            (self.gate.set if news else self.gate.clear)()
        else:
            self.register_layout(news)

    def close(self) -> None:
        self.gate.set()


@dataclass(frozen=True)
class Recipe:
    folders: dict[str, Path]

    def __call__(self, say: Callable[[Any], None]) -> ChildCompilingStore:
        say("cooked")
        return ChildCompilingStore(self.folders)


def open_door(kind: str, config: EngineConfig, adapter_dirs: dict[str, Path]) -> Running:
    """A running engine that knows the store's layout; `kind` is "thread" or "process"."""
    store = CompilingStore()
    digests = {name: store.register(folder) for name, folder in adapter_dirs.items()}
    engine: Any
    if kind == "thread":
        engine = EngineThread(config, store)
    else:
        engine = EngineProcess(config, Recipe(store.folders)).load()
        engine.send(StoreMessage(engine.layout))
    running = Running(engine, store, digests)
    engine.start(running.hear)
    engine.send(LayoutAccepted(store.register_layout(engine.layout)))
    return running


def set_gate(running: Running, is_open: bool) -> None:
    """Whether pulls go on."""
    if isinstance(running.engine, EngineProcess):
        running.engine.send(StoreMessage(is_open))
    else:
        (running.store.gate.set if is_open else running.store.gate.clear)()
