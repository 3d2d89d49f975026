"""The engine's only door: picklable messages in, one batch of outputs per turn out.

Here it lives in a thread of its own; a process would have the same door.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.puller import PullEvent
from inference_svc.adapters.store import AdapterStore
from inference_svc.core import Message, Output, StepOutputs, Stop
from inference_svc.engine.build import build_engine
from inference_svc.engine.config import EngineConfig
from inference_svc.errors import EngineFailed, ShuttingDown
from inference_svc.model.geometry import ModelGeometry

log = logging.getLogger(__name__)


class EngineThread:
    """Loads the model when made; serves from `start` to `stop`.

    `store` is used from pull threads. Raises UnsupportedModel for a model we do not compute, and
    ValueError for memory that does not suffice.
    """

    def __init__(self, config: EngineConfig, store: AdapterStore) -> None:
        self._inbox: queue.SimpleQueue[Message | PullEvent] = queue.SimpleQueue()
        self.built = build_engine(config, store, self._inbox.put)
        self._thread = threading.Thread(target=self._serve, name="loadout-engine", daemon=True)
        self._on_outputs: Callable[[StepOutputs], None] = lambda outputs: None
        self._failed = False

    @property
    def layout(self) -> ModelLayout:
        return self.built.layout

    @property
    def geometry(self) -> ModelGeometry:
        return self.built.geometry

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests: started, not stopped, not failed."""
        return self._thread.is_alive() and not self._failed

    def start(self, on_outputs: Callable[[StepOutputs], None]) -> None:
        """`on_outputs` is called in the engine's thread, at most once per turn; it must not
        block."""
        self._on_outputs = on_outputs
        self._thread.start()

    def send(self, message: Message) -> None:
        """Never blocks; may be called from any thread."""
        self._inbox.put(message)

    def stop(self) -> None:
        """Ends what still runs with ShuttingDown, frees the threads. Idempotent."""
        if self._thread.ident is None:
            self.built.puller.close()
            return
        if self._thread.is_alive():
            self.send(Stop())
            self._thread.join()

    # --- in the engine's thread ------------------------------------------------------------------

    def _serve(self) -> None:
        engine = self.built.engine
        try:
            stepped = False
            while not engine.is_stopping:
                outputs, stepped = engine.turn(self._messages(wait=not stepped))
                if outputs.outputs or outputs.replies:
                    self._on_outputs(outputs)
            self._on_outputs(engine.end_all(ShuttingDown("the server is shutting down")))
        except Exception:
            log.exception("the engine failed")
            self._fail()
        self._end_pulls()

    def _messages(self, wait: bool) -> list[Message | PullEvent]:
        """Everything in the inbox; when there is nothing to compute, waits for a message or for
        the next expiry."""
        messages: list[Message | PullEvent] = []
        try:
            if wait:
                expiry_s = self.built.engine.next_expiry_s()
                timeout_s = None if expiry_s is None else max(0.0, expiry_s - time.monotonic())
                messages.append(self._inbox.get(timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _fail(self) -> None:
        """Answers every request; the structures may be broken, so nothing is touched."""
        self._failed = True
        error = EngineFailed("the engine failed")
        outputs = tuple(
            Output(request_id, error=error) for request_id in self.built.engine.sequences
        )
        self._on_outputs(StepOutputs(outputs, failure=error))
        self.built.residency.cancel_all()

    def _end_pulls(self) -> None:
        """Waits until no pull thread writes any more, then ends the threads."""
        residency = self.built.residency
        self.built.puller.close()
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, PullEvent) and not self._failed:
                residency.on_pull_event(message, time.monotonic())
