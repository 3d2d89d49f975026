"""The store in memory, when the engine is a process of its own: its messages there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.memory_store import MemoryStore
from inference_svc.adapters.layout import ModelLayout
from inference_svc.engine.build import BuiltEngine
from inference_svc.engine.thread import EngineThread


@dataclass(frozen=True, slots=True)
class AddVariants:
    digest: str
    count: int


@dataclass(frozen=True, slots=True)
class CheckIdle:
    """Answered with what `check_idle` raised, or None."""


@dataclass(frozen=True, slots=True)
class Checked:
    error: str | None


class StoreCopy(MemoryStore):
    """The copy in the engine's process."""

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
    """Asserts that the engine's accounts agree, and that nothing is held."""
    built.engine.check_integrity()
    assert built.engine.scheduler.pages.num_used == 0, "pages are held"
    assert not built.engine.sequences, "sequences are held"
    assert all(r.users == 0 for r in built.residency.device.residents()), "pins are held"


def _checked() -> str | None:
    # There is no message for it, and the store does not know the engine: it is searched for. By
    # type(): isinstance would ask every object for its __class__, and some warn when asked.
    (engine,) = (found for found in gc.get_objects() if type(found) is EngineThread)
    try:
        check_idle(engine.built)
    except AssertionError as error:
        return f"the engine is not idle: {error!r}"
    return None
