"""The engine's process: an engine in a thread, and its door on standard input.

Frames are pickles: our parent sends (config, recipe), then lists of messages; it hears Ready or
what went wrong, then StepOutputs, one per turn, and StoreMessage.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from inference_svc.adapters.image_source import AdapterStore
from inference_svc.adapters.layout import ModelLayout
from inference_svc.config import EngineConfig
from inference_svc.engine.messages import Stop, StoreMessage
from inference_svc.engine.thread import EngineThread
from inference_svc.errors import UnsupportedModel
from inference_svc.model.geometry import ModelGeometry
from servicekit.errors import ServiceError

log = logging.getLogger(__name__)


SWITCH_S = 5e-4
"""How long a pull's Python may hold up the engine, which comes back from a step in native code and
wants the interpreter: by default ten times as long."""


class ChildStore(AdapterStore, Protocol):
    """An adapter store beside the engine, kept informed by its counterpart in our parent."""

    def hear(self, news: Any) -> None:
        """What the counterpart has to say."""
        ...

    def close(self) -> None: ...


class StoreFactory(Protocol):
    """Pickles. Makes the store in the engine's process, and does what else must be done first
    there, such as configuring the log. `publish` sends updates to the counterpart, from any
    thread."""

    def __call__(self, publish: Callable[[Any], None], /) -> ChildStore: ...


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built."""

    layout: ModelLayout
    geometry: ModelGeometry


def encode(frame: object) -> bytes:
    return pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A whole group or cgroup may be told to end: our parent drains first, then tells us.
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    door = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        config, recipe = pickle.loads(door.recv_bytes())
        Child(door, config, recipe).serve()
    except (EOFError, OSError):
        # Our parent is dead: nobody is left to be answered, and memory and device are needed.
        os._exit(1)


class Child:
    """Reads in the main thread from the start, so that the parent's end is noticed at any time,
    also while a large model is being loaded."""

    def __init__(self, door: Connection, config: EngineConfig, recipe: StoreFactory) -> None:
        self._door = door
        self._config = config
        self._recipe = recipe
        self._lock = threading.Lock()
        self._builder = threading.Thread(target=self._build, name="loadout-build", daemon=True)
        self._engine: EngineThread | None = None
        self._store: ChildStore | None = None

    def serve(self) -> None:
        """Until the parent says Stop. Raises EOFError or OSError when it dies."""
        self._builder.start()
        while self._take(pickle.loads(self._door.recv_bytes())):
            pass
        assert self._engine is not None
        assert self._store is not None
        self._engine.stop()
        self._store.close()

    def _take(self, messages: list[Any]) -> bool:
        """Hands messages on; False when there will be no more."""
        assert self._engine is not None, "messages follow Ready"
        assert self._store is not None
        for message in messages:
            if isinstance(message, StoreMessage):
                self._store.hear(message.content)
            elif not isinstance(message, Stop):
                self._engine.send(message)
        return not any(isinstance(message, Stop) for message in messages)

    def _build(self) -> None:
        try:
            self._store = self._recipe(lambda news: self._say(StoreMessage(news)))
            self._engine = EngineThread(self._config, self._store)
        except Exception as error:
            self._say(_portable(error))
            return
        self._engine.start(self._say)
        self._say(Ready(self._engine.layout, self._engine.geometry))

    def _say(self, frame: object) -> None:
        data = encode(frame)
        try:
            with self._lock:
                self._door.send_bytes(data)
        except OSError:
            os._exit(1)  # as in main


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same and pickles."""
    if not isinstance(error, ServiceError | UnsupportedModel | ValueError | OSError):
        log.error("the engine cannot be built", exc_info=error)
    try:
        if type(pickle.loads(encode(error))) is type(error):
            return error
    except Exception:
        log.debug("%r does not pickle", error)
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(str(error))
