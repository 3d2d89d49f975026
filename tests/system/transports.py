"""The engine in a thread or a process, over the adapter store without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc.core import EngineConfig
from inference_svc.engine.transport.messages import LayoutAccepted, StoreMessage
from inference_svc.engine.transport.process import EngineProcess
from inference_svc.engine.transport.thread import EngineThread
from tests.system.engines import CompilingStore, Running


class ChildCompilingStore(CompilingStore):
    """In the engine's process; a message opens or closes its gate."""

    def on_update(self, content: Any) -> None:
        if isinstance(content, bool):
            (self.gate.set if content else self.gate.clear)()
        else:
            self.register_layout(content)

    def close(self) -> None:
        self.gate.set()


@dataclass(frozen=True)
class StoreFactory:
    folders: dict[str, Path]

    def __call__(self, publish: Callable[[Any], None]) -> ChildCompilingStore:
        publish("made")
        return ChildCompilingStore(self.folders)


def start_engine(kind: str, config: EngineConfig, adapter_dirs: dict[str, Path]) -> Running:
    """A running engine that knows the store's layout; `kind` is "thread" or "process"."""
    store = CompilingStore()
    digests = {name: store.register(folder) for name, folder in adapter_dirs.items()}
    engine: Any
    if kind == "thread":
        engine = EngineThread(config, store)
    else:
        engine = EngineProcess(config, StoreFactory(store.folders)).load()
        engine.send(StoreMessage(engine.layout))
    running = Running(engine, store, digests)
    engine.start(running.on_outputs)
    engine.send(LayoutAccepted(store.register_layout(engine.layout)))
    return running


def set_gate(running: Running, is_open: bool) -> None:
    """Whether pulls go on."""
    if isinstance(running.engine, EngineProcess):
        running.engine.send(StoreMessage(is_open))
    else:
        (running.store.gate.set if is_open else running.store.gate.clear)()
