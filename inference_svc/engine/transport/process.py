"""Runs the engine in a process; talks to it by messages, through a socket.

The child is spawned, not forked: neither gRPC nor OpenMP survives a fork. It leads a process group
of its own, so that signals to this process (Ctrl-C) do not end it before requests are drained; when
this process dies, the child reads the end of the socket and exits at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

from inference_svc.adapters.layout import ModelLayout
from inference_svc.backends.speed_notes import Speed
from inference_svc.core import EngineConfig
from inference_svc.engine.transport.messages import Message, StepOutputs, Stop, StoreMessage
from inference_svc.engine.transport.pixels import send_pixels
from inference_svc.engine.transport.process_main import DUMP_SIGNAL, Ready, StoreFactory, encode
from inference_svc.errors import EngineFailed
from inference_svc.model.description import Decoder

logger = logging.getLogger(__name__)

END_S = 30.0
"""How long a child may take to end; a hanging one is killed."""
DUMP_S = 0.2
"""How long a line of the log, or the stacks of a process, may take to be written."""
KILL_S = 10.0
"""How long a killed child may take to be gone: a child that waits in the driver may stay for
ever."""
# This process's path, so that the child imports the same modules, and none from the working folder.
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from servicekit import interpreter_gc; "
    "interpreter_gc.pause(); from inference_svc.engine.transport.process_main import main; main()"
)


class EngineProcess:
    """The child begins to load the model when this is made; serves from `start` to `stop`.

    `make_store` makes the store in the child, where pulls run; `on_store_message` receives that
    store's messages, in a thread of this process. `load` sets `layout`, `other_layouts`, of the
    other ranks, `decoder` and `speed`.
    """

    layout: ModelLayout
    other_layouts: tuple[ModelLayout, ...]
    decoder: Decoder
    speed: Speed

    def __init__(
        self,
        config: EngineConfig,
        make_store: StoreFactory,
        on_store_message: Callable[[Any], None] = lambda content: None,
    ) -> None:
        self._on_store_message = on_store_message
        self._on_outputs: Callable[[StepOutputs], None] = lambda outputs: None
        self._outbox: queue.SimpleQueue[Message | StoreMessage] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="loadout-engine-in", daemon=True)
        self._writer = threading.Thread(target=self._write, name="loadout-engine-out", daemon=True)
        self._is_stopping = False
        self._failed = False
        self._rank_pids: dict[str, int] = {}
        self._socket, theirs = socket.socketpair()
        with theirs:
            program = _PROGRAM.format(path=sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program], stdin=theirs.fileno(), process_group=0
            )
        self._connection = Connection(os.dup(self._socket.fileno()))
        with contextlib.suppress(OSError):  # it is dead already: `load` raises that
            self._connection.send_bytes(encode((config, make_store)))

    def load(self) -> Self:
        """Waits until the model is loaded. Raises UnsupportedModel or ValueError as EngineThread
        does, EngineFailed if the child dies."""
        try:
            while isinstance(answer := pickle.loads(self._connection.recv_bytes()), StoreMessage):
                self._on_store_message(answer.content)
        except (EOFError, OSError):
            raise EngineFailed(f"the engine's process {self._wait_for_end()}") from None
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Ready)
        self.layout, self.other_layouts = answer.layout, answer.other_layouts
        self.decoder, self.speed = answer.decoder, answer.speed
        self._rank_pids = answer.rank_pids
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests: started, not stopped, not failed."""
        return self._reader.is_alive() and not self._failed

    def dump_stacks(self) -> None:
        """Has the child, and other ranks, write to standard error where their threads are, also
        while they hang."""
        threading.Thread(target=self._dump_stacks, name="loadout-stacks", daemon=True).start()

    def _dump_stacks(self) -> None:
        """Has one write after the other, so that their lines do not mix."""
        for name, pid in {"the engine": self.pid, **self._rank_pids}.items():
            if self._process.poll() is not None:
                return  # ranks have ended with it
            logger.warning("where the threads of %s, process %d, are:", name, pid)
            time.sleep(DUMP_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, DUMP_SIGNAL)
            time.sleep(DUMP_S)

    def start(self, on_outputs: Callable[[StepOutputs], None]) -> None:
        """Starts to serve. `on_outputs` is called in a thread of this object's, at most once per
        step; it must not block."""
        self._on_outputs = on_outputs
        self._reader.start()
        self._writer.start()

    def send(self, message: Message | StoreMessage) -> None:
        """Queues a message. Never blocks; may be called from any thread."""
        self._outbox.put(message)

    def stop(self, timeout_s: float = END_S) -> None:
        """Ends open requests with Draining, and the child: a child that hangs for this long is
        killed. Idempotent."""
        if self._connection.closed:
            return
        self._is_stopping = True
        deadline_s = time.monotonic() + timeout_s
        if self._reader.ident is not None:
            self.send(Stop())
            self._reader.join(timeout_s)
        self._end(max(0.0, deadline_s - time.monotonic()))

    def _end(self, timeout_s: float) -> None:
        """Ends the child and the threads."""
        with contextlib.suppress(OSError):  # it has ended by itself
            # Closing alone would not wake the reader.
            self._socket.shutdown(socket.SHUT_RDWR)
        logger.debug("the engine's process %s", self._wait_for_end(timeout_s))
        for thread in (self._reader, self._writer):
            if thread.ident is not None:
                thread.join()
        self._connection.close()
        self._socket.close()

    def _wait_for_end(self, timeout_s: float = END_S) -> str:
        """Returns how the child ended."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                code = self._process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                logger.error(
                    "the engine's process %d cannot be ended: it hangs in the driver, which only a "
                    "reset of the device (`nvidia-smi -r`) or a reboot of the node ends",
                    self.pid,
                )
                return "cannot be ended"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    # In the reader's and the writer's threads.

    def _write(self) -> None:
        """Sends all queued messages in one write each time."""
        while True:
            messages = [self._outbox.get()]
            while not self._outbox.empty():
                messages.append(self._outbox.get())
            try:
                self._connection.send_bytes(encode(messages))
                send_pixels(self._socket, messages)
            except ConnectionError:
                return  # the reader finds out why
            except Exception:  # lost messages would leave their senders waiting for ever
                logger.exception("messages to the engine cannot be sent")
                self._process.kill()
                return
            if any(isinstance(message, Stop) for message in messages):
                return
            del messages  # while it waits it holds no pixels

    def _read(self) -> None:
        try:
            while True:
                message = pickle.loads(self._connection.recv_bytes())
                if isinstance(message, StepOutputs):
                    self._failed |= message.failure is not None
                    self._on_outputs(message)
                else:
                    self._on_store_message(message.content)
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("messages from the engine cannot be read")
            self._process.kill()
        if not self._is_stopping:
            self._failed = True
            how = self._wait_for_end()
            logger.error("the engine's process %s", how)
            self._on_outputs(StepOutputs(failure=EngineFailed.because(f"its process {how}")))
