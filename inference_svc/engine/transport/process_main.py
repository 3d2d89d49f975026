"""The main program of the engine's process: an engine in a thread, its socket on standard input.

Frames are pickles. The parent sends (config, make_store), then lists of messages, each with the
files of its pictures' pixels; it receives Ready or the error, then StepOutputs, one per step, and
StoreMessages.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.pulls.image_source import AdapterStore
from inference_svc.backends.speed_notes import Speed
from inference_svc.core import EngineConfig
from inference_svc.engine.transport.messages import StepOutputs, Stop, StoreMessage
from inference_svc.engine.transport.pixels import lost, receive_pixels
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import Decoder
from servicekit import interpreter_gc
from servicekit.errors import ServiceError
from servicekit.shared_memory import Mapped

logger = logging.getLogger(__name__)


SWITCH_S = 5e-4
"""How long a pull's Python may delay the engine, which needs the interpreter when it returns from a
step in native code: by default ten times as long."""


DUMP_SIGNAL = signal.SIGUSR1
"""Has the engine's process write to standard error where its threads are."""


class ChildStore(AdapterStore, Protocol):
    """An adapter store in the engine's process, informed by its counterpart in the parent."""

    def on_update(self, content: Any) -> None:
        """Receives a message of the counterpart."""
        ...

    def close(self) -> None: ...


class StoreFactory(Protocol):
    """Pickles. Makes the store in the engine's process, and in each other rank's, and does other
    preparations there, such as configuring the log. `publish` sends updates to the counterpart,
    from any thread."""

    def __call__(self, publish: Callable[[Any], None], /) -> ChildStore: ...


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built. `rank_pids` are the processes of the other ranks by their names."""

    layout: ModelLayout
    other_layouts: tuple[ModelLayout, ...]
    decoder: Decoder
    speed: Speed
    rank_pids: dict[str, int]


def encode(frame: object) -> bytes:
    return pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)


def connect_to_parent() -> Connection:
    """Prepares a process that computes, and returns the socket that it was given as its standard
    input. It ignores signals that may go to the whole group: the parent drains first, then says
    when to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    sys.setswitchinterval(SWITCH_S)
    connection = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def main() -> None:
    connection = connect_to_parent()
    try:
        config, make_store = pickle.loads(connection.recv_bytes())
        Child(connection, config, make_store).serve()
    except (EOFError, OSError):
        # The parent is dead: nothing is left to answer, and memory and device are needed.
        os._exit(1)
    # Kept objects need no walk through them at the interpreter's end.
    interpreter_gc.resume()


class Child:
    """Reads in the main thread from the start, so that the parent's end is noticed at any time,
    also while a large model is being loaded."""

    def __init__(
        self, connection: Connection, config: EngineConfig, make_store: StoreFactory
    ) -> None:
        self._connection = connection
        self._config = config
        self._make_store = make_store
        self._mapped = Mapped()
        self._lock = threading.Lock()
        self._builder = threading.Thread(target=self._build, name="loadout-build", daemon=True)
        self._engine: EngineThread | None = None
        self._store: ChildStore | None = None

    def serve(self) -> None:
        """Serves until the parent sends Stop. Raises EOFError or OSError when it dies."""
        self._builder.start()
        with socket.socket(fileno=os.dup(self._connection.fileno())) as files:
            while self._take(self._receive(files)):
                pass
        assert self._engine is not None
        assert self._store is not None
        self._engine.stop()
        self._store.close()

    def _receive(self, files: socket.socket) -> list[Any]:
        messages: list[Any] = pickle.loads(self._connection.recv_bytes())
        receive_pixels(files, messages, self._mapped)
        return messages

    def _take(self, messages: list[Any]) -> bool:
        """Passes messages on; returns False after the last."""
        assert self._engine is not None, "messages follow Ready"
        assert self._store is not None
        for message in messages:
            if isinstance(message, StoreMessage):
                self._store.on_update(message.content)
                self._update_ranks(message.content)
            elif (refusal := lost(message)) is not None:
                self._send(StepOutputs((refusal,)))
            elif not isinstance(message, Stop):
                self._engine.send(message)
        return not any(isinstance(message, Stop) for message in messages)

    def _update_ranks(self, content: Any) -> None:
        if self._engine is not None and self._engine.built.ranks is not None:
            self._engine.built.ranks.update_stores(content)

    def _publish(self, content: Any) -> None:
        """Passes a finding of this process's store on to its counterparts."""
        self._send(StoreMessage(content))
        self._update_ranks(content)

    def _on_rank_update(self, content: Any) -> None:
        assert self._store is not None
        self._store.on_update(content)
        self._send(StoreMessage(content))

    def _build(self) -> None:
        # Before the engine is there: `gc.get_objects` does not list frozen objects for bench.
        interpreter_gc.resume()
        try:
            self._store = self._make_store(self._publish)
            self._engine = EngineThread(self._config, self._store, self._make_store)
        except Exception as error:
            self._send(portable(error))
            return
        built, pids = self._engine.built, {}
        if built.ranks is not None:
            built.ranks.on_store_update = self._on_rank_update
            pids = {each.name: each.pid for each in built.ranks.local}
        self._engine.start(self._send)
        self._send(Ready(built.layout, built.other_layouts, built.decoder, built.speed, pids))

    def _send(self, frame: object) -> None:
        data = encode(frame)
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except OSError:
            os._exit(1)  # as in main


def portable(error: Exception) -> Exception:
    """Returns the error, or one with the same message that pickles."""
    if not isinstance(error, ServiceError | UnsupportedModel | ValueError | OSError):
        logger.error("the engine cannot be built", exc_info=error)
    try:
        if type(pickle.loads(encode(error))) is type(error):
            return error
    except Exception:
        logger.debug("%r does not pickle", error)
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(str(error))
