"""The processes of the other ranks, as rank 0 starts and watches them."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from inference_svc.backends.exchange import ExchangeFailed, GlooExchange, meeting_point
from inference_svc.core import EngineConfig
from inference_svc.engine.ranks.messages import (
    FREE,
    FREE_ALL,
    LOST_CONTACT,
    RESTORE,
    STEP,
    Built,
    Described,
    NotBuilt,
    Ping,
    Pong,
    PullEnded,
    Start,
    StepFailed,
)
from inference_svc.errors import EngineFailed
from inference_svc.model.description import Rank

logger = logging.getLogger(__name__)

EXCHANGE_S = 60.0
"""How long a rank may take to its part of an exchange: a rank that hangs ends the engine."""
END_S = 10.0
"""How long a rank may take to end."""
DEATH_S = 5.0
"""How long a failed exchange waits for the end of the process that caused it."""
ANSWER_S = 2.0
"""How long a rank may take to say that it is there."""
# This process's path, so that the child imports the same modules, and none from the working folder.
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from inference_svc.engine.ranks.main import main; main()"
)


class RankProcess:
    """One other rank: `control` for messages in both directions, `steps` for steps."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        our_steps, their_steps = socket.socketpair()
        self.steps_fd = their_steps.fileno()
        self.control, self.steps = Connection(ours.detach()), Connection(our_steps.detach())
        with theirs, their_steps:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM.format(path=sys.path)],
                stdin=theirs.fileno(),
                pass_fds=(self.steps_fd,),
                process_group=0,
            )
        self.why = ""
        """Why it ends, as it has said."""
        self.has_lost_contact = self._hangs = False
        self.has_answered = threading.Event()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"rank {self.rank.index}"

    def send(self, message: object) -> None:
        """Sends a message, from any thread. A rank that has ended is noticed by its reader."""
        with self._lock, contextlib.suppress(OSError):
            self.control.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """Returns its next message. Raises EOFError or OSError when it has ended."""
        return pickle.loads(self.control.recv_bytes())

    def end(self, timeout_s: float) -> str:
        """Waits for its end, after so long by killing it; returns how it ended."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._hangs = True
            self._process.kill()
            code = self._process.wait()
        if self._hangs:
            return "does not answer"
        self.has_lost_contact = code == LOST_CONTACT
        if self.why:
            return f"failed: {self.why}"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def hang_up(self) -> None:
        """Closes its sockets, by which it ends."""
        for each in (self.steps, self.control):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)


class RankGroup:
    """All ranks but the first. They begin to load the model when this is made.

    `on_failure` is called once, from any thread, when a rank has ended or failed; `on_pull_ended`
    with the index of a rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_store: Callable[[Callable[[Any], None]], Any],
        on_failure: Callable[[EngineFailed], None],
    ) -> None:
        self.count = config.tensor_parallel
        self.failure: EngineFailed | None = None
        self.on_pull_ended: Callable[[int, PullEnded], None] = lambda index, ended: None
        self._on_failure = on_failure
        self._is_closing = False
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._store = meeting_point(self.count)
        self.others = [RankProcess(Rank(index, self.count)) for index in range(1, self.count)]
        for each in self.others:
            start = Start(config, each.rank, make_store, self._store.port, each.steps_fd)
            each.send(start)
        self._readers = [
            threading.Thread(
                target=self._read, args=(each,), name=f"loadout-{each.name}", daemon=True
            )
            for each in self.others
        ]

    def meet(self) -> GlooExchange:
        """Returns rank 0's exchange, once every rank is there. Raises the error of a rank that
        cannot load the model, and EngineFailed for a rank that ends."""
        for each in self.others:
            self._expect(each, Described)
        return GlooExchange(Rank(0, self.count), self._store, EXCHANGE_S)

    def wait_until_built(self) -> int:
        """Waits until every rank has loaded its part, and watches them from then on; returns the
        least number of pages. Raises as `meet`."""
        found = [self._expect(each, Built) for each in self.others]
        for each in self.others:
            logger.info("%s is process %d", each.name, each.pid)
        for reader in self._readers:
            reader.start()
        return min(each.num_pages for each in found)

    def _expect(self, rank: RankProcess, kind: type) -> Any:
        try:
            answer = rank.receive()
        except (EOFError, OSError):
            raise EngineFailed(f"{rank.name} {rank.end(DEATH_S)} while it started") from None
        if isinstance(answer, NotBuilt):
            raise answer.error
        assert isinstance(answer, kind)
        return answer

    def send_step(self, buffer: bytes) -> None:
        """Has all ranks compute a step, without waiting."""
        self._send_steps(STEP + buffer)

    def free_memory(self, *, weights: bool) -> int:
        """Has all ranks free their pages, or weights as well; returns the bytes."""
        return self._ask(FREE_ALL if weights else FREE)

    def restore(self) -> None:
        """Has all ranks allocate their memory again."""
        self._ask(RESTORE)

    def _send_steps(self, frame: bytes) -> None:
        for each in self.others:
            try:
                each.steps.send_bytes(frame)
            except OSError:
                raise self.lost(each) from None

    def _ask(self, frame: bytes) -> int:
        self._send_steps(frame)
        total = 0
        for each in self.others:
            try:
                total += int.from_bytes(each.steps.recv_bytes(), "little")
            except (EOFError, OSError):
                raise self.lost(each) from None
        return total

    @property
    def is_ended(self) -> bool:
        """Whether no rank computes or pulls any more."""
        return self._is_closing or self.failure is not None

    def lost(self, rank: RankProcess) -> EngineFailed:
        """Returns the failure of a rank that has ended; of one that another has left alone, the
        other's."""
        how = rank.end(DEATH_S)
        if rank.has_lost_contact:
            self._failed.wait(DEATH_S)
        return self._fail(f"{rank.name} {how}")

    def blame(self, error: Exception) -> EngineFailed:
        """Returns the failure that an error of rank 0's step has: another rank's end or silence,
        or its own."""
        if not isinstance(error, ExchangeFailed):
            return self._fail(f"rank 0 failed: {type(error).__name__}: {error}")
        for each in self.others:
            each.has_answered.clear()
            each.send(Ping())
        for each in self.others:
            if not each.has_answered.wait(ANSWER_S) and not self._failed.is_set():
                how = each.end(ANSWER_S)  # which kills one that hangs
                if not each.has_lost_contact:
                    return self._fail(f"{each.name} {how}")
        self._failed.wait(DEATH_S)
        return self._fail(f"ranks lost contact: {error}")

    def _fail(self, why: str) -> EngineFailed:
        with self._lock:
            is_first = self.failure is None
            self.failure = self.failure or EngineFailed.because(why)
            self._failed.set()
        if is_first and not self._is_closing:
            logger.error("%s", why)
            self._on_failure(self.failure)
        return self.failure

    def _read(self, rank: RankProcess) -> None:
        """Takes a rank's messages until it ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = rank.receive()
                if isinstance(message, PullEnded):
                    self.on_pull_ended(rank.rank.index, message)
                elif isinstance(message, StepFailed):
                    rank.why = message.why
                elif isinstance(message, Pong):
                    rank.has_answered.set()
        if not self._is_closing:
            self.lost(rank)

    def close(self) -> None:
        """Ends all ranks. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        for each in self.others:
            each.hang_up()
        for each in self.others:
            logger.debug("%s %s", each.name, each.end(END_S))
        for reader in self._readers:
            if reader.ident is not None:
                reader.join()
        for each in self.others:
            each.control.close()
            each.steps.close()
