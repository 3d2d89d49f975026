"""Runs the engine in a thread; talks to it by messages.

`process.EngineProcess` does the same with an engine in a process of its own.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.pulls.image_source import AdapterStore
from inference_svc.adapters.pulls.pull import PullEvent
from inference_svc.backends.speed_notes import Speed
from inference_svc.core import EngineConfig
from inference_svc.engine.build import build_engine
from inference_svc.engine.transport.messages import (
    Call,
    Command,
    Message,
    Output,
    Reply,
    StepOutputs,
    Stop,
    Submit,
)
from inference_svc.host.device_faults import engine_failed, fault_fields, start_failed
from inference_svc.model.description import Decoder
from servicekit.errors import Draining
from servicekit.telemetry.stacks import thread_stacks

logger = logging.getLogger(__name__)

END_S = 30.0
"""How long the engine may take to end."""
MAX_WAIT_S = 60.0
"""The longest wait of an idle engine; longer ones overflow the clock."""


class EngineThread:
    """Loads the model when made; serves from `start` to `stop`.

    `store` is used from pull threads; `make_store` makes the other ranks' stores, if there are
    any: see `process_main.StoreFactory`. Raises UnsupportedModel for a model that no backend
    computes, ValueError for memory that does not suffice, and EngineFailed for a device that fails.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: AdapterStore,
        make_store: Callable[[Callable[[Any], None]], Any] | None = None,
    ) -> None:
        self._inbox: queue.SimpleQueue[Message | PullEvent] = queue.SimpleQueue()
        try:
            self.built = build_engine(config, store, self._inbox.put, make_store)
        except RuntimeError as error:
            failure = start_failed(error)
            if failure is None:
                raise
            logger.error("%s", failure.message, exc_info=error, extra=fault_fields(failure))
            raise failure from error
        self._thread = threading.Thread(target=self._serve, name="loadout-engine", daemon=True)
        self._on_outputs: Callable[[StepOutputs], None] = lambda outputs: None
        self._failed = False
        self._is_stopped = False

    @property
    def layout(self) -> ModelLayout:
        return self.built.layout

    @property
    def other_layouts(self) -> tuple[ModelLayout, ...]:
        return self.built.other_layouts

    @property
    def decoder(self) -> Decoder:
        return self.built.decoder

    @property
    def speed(self) -> Speed:
        return self.built.speed

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests: started, not stopped, not failed."""
        return self._thread.is_alive() and not self._failed

    def start(self, on_outputs: Callable[[StepOutputs], None]) -> None:
        """Starts to serve. `on_outputs` is called in the engine's thread, at most once per step,
        and in others that answer while it hangs; it must not block."""
        self._on_outputs = on_outputs
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queues a message. Never blocks; may be called from any thread."""
        if isinstance(message, Call) and message.command is Command.STACKS:
            name = "loadout-stacks"
            threading.Thread(target=self._tell, args=(message,), name=name, daemon=True).start()
            return
        self._inbox.put(message)

    def _tell(self, call: Call) -> None:
        """Answers where all threads are, in a thread that hangs with none of them."""
        stacks = {f"process {os.getpid()}, the engine": thread_stacks()}
        if self.built.ranks is not None:
            stacks |= self.built.ranks.stacks.collect()
        self._on_outputs(StepOutputs(replies=(Reply(call.call_id, stacks),)))

    def dump_stacks(self) -> None:
        """Writes to standard error where all threads are."""
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)

    def stop(self, timeout_s: float = END_S) -> None:
        """Ends open requests with Draining, and the threads: a thread that hangs for this long is
        left to the end of the process. Idempotent."""
        if self._thread.ident is None:
            self.built.close()
            return
        if self._thread.is_alive() and not self._is_stopped:
            self._is_stopped = True
            self.send(Stop())
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.error("the engine does not end", extra={"seconds": timeout_s})

    # In the engine's thread.

    def _serve(self) -> None:
        engine = self.built.engine
        self.built.place_threads()
        try:
            go_on = False
            while not engine.is_stopping:
                messages = self._messages(wait=not go_on)
                with engine.times.measure():
                    outputs, go_on = engine.step(messages)
                    messages.clear()  # while it waits it holds no pixels
                    if outputs.outputs or outputs.replies or outputs.spans:
                        self._on_outputs(outputs)
            error: Exception = Draining("the server is shutting down")
            self._on_outputs(engine.end_all(error))
        except Exception as cause:
            self._failed = True
            error = failure = engine_failed(cause, "a step")
            logger.exception("%s", failure.for_operator, extra=fault_fields(failure))
            self._on_outputs(engine.give_up(failure))
            self.built.residency.loader.cancel_all()
            engine.commands.close_traces()
        self.built.close()  # no thread writes into the memory of adapters afterwards
        self._refuse_the_rest(error)

    def _messages(self, wait: bool) -> list[Message | PullEvent]:
        """Returns all messages in the inbox; with `wait`, waits for one or for the next expiry, or
        uses the time."""
        messages: list[Message | PullEvent] = []
        try:
            if wait:
                expiry_s = self.built.engine.next_expiry_s()
                timeout_s = MAX_WAIT_S
                if expiry_s is not None:
                    timeout_s = min(MAX_WAIT_S, max(0.0, expiry_s - time.monotonic()))
                if timeout_s > 0 and self._inbox.empty() and self.built.engine.use_idle_time():
                    timeout_s = 0.0  # other work of the kind may be left
                messages.append(self._inbox.get(timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _refuse_the_rest(self, error: Exception) -> None:
        """Answers messages that came too late to be taken."""
        outputs, replies = [], []
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, PullEvent) and not self._failed:
                self.built.residency.loader.on_pull_event(message, time.monotonic())
            elif isinstance(message, Submit):
                outputs.append(Output(message.request.request_id, error=error))
            elif isinstance(message, Call):
                replies.append(Reply(message.call_id, error=error))
        if outputs or replies:
            self._on_outputs(StepOutputs(tuple(outputs), tuple(replies)))
