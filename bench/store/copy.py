"""The store in memory for an engine in its own process, and the messages to it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.store.memory_store import MemoryStore
from inference_svc.adapters.layout import ModelLayout
from inference_svc.engine.build import BuiltEngine
from inference_svc.engine.transport.thread import EngineThread


@dataclass(frozen=True, slots=True)
class AddVariants:
    digest: str
    count: int


@dataclass(frozen=True, slots=True)
class CheckIdle:
    """A message that is answered with the error of `check_idle`, or None."""


@dataclass(frozen=True, slots=True)
class Checked:
    error: str | None


class StoreCopy(MemoryStore):
    """The copy of the store in the engine's process."""

    def __init__(self, folders: dict[str, Path], publish: Callable[[Any], None]) -> None:
        super().__init__(dict(folders))
        self._publish = publish

    def on_update(self, content: ModelLayout | AddVariants | CheckIdle) -> None:
        if isinstance(content, ModelLayout):
            self.accept_layout(content)
        elif isinstance(content, AddVariants):
            self.add_variants(content.digest, content.count)
        else:
            self._publish(Checked(_checked()))

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StoreCopyFactory:
    folders: dict[str, Path]

    def __call__(self, publish: Callable[[Any], None]) -> StoreCopy:
        return StoreCopy(self.folders, publish)


def check_idle(built: BuiltEngine) -> None:
    """Asserts that the engine's counters agree, and that it holds nothing."""
    built.engine.check_integrity()
    assert built.engine.scheduler.states.num_used == 0, "pages are held"
    assert not built.engine.sequences, "sequences are held"
    assert all(r.users == 0 for r in built.residency.device.residents()), "pins are held"


def _checked() -> str | None:
    # There is no message for this, and the store has no reference to the engine, so search for it.
    # With type(), because isinstance reads every object's __class__, and some objects then warn.
    (engine,) = (found for found in gc.get_objects() if type(found) is EngineThread)
    try:
        check_idle(engine.built)
    except AssertionError as error:
        return f"the engine is not idle: {error!r}"
    return None
