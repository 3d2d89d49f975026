"""Another rank, as rank 0 sees it: its connections, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import socket
import struct
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from inference_svc.engine.control.status_types import RankStatus
from inference_svc.engine.ranks.liveness import Liveness
from inference_svc.engine.ranks.messages import Pong
from inference_svc.engine.ranks.orphans import rank_command
from inference_svc.model.description import Rank

EXCHANGE_S = 60.0
"""How long a rank may take to its part of an exchange: a rank that hangs ends the engine."""
DEATH_S = 5.0
"""How long a failed exchange waits for the end of the process that caused it."""
PING_S = 1.0
"""How often each rank is asked whether it answers, and for its status."""
QUIET_S = 10.0
"""How long a rank may not answer until operators see that."""
SILENCE_S = 30.0
"""How long a rank may not answer, or take no message. Rank 0 notices it before an exchange
that waits for the rank fails, which then does not blame another."""


def _pair(send_s: float) -> tuple[Connection, socket.socket]:
    """Returns a socket of this process, which sends for at most so long, and its other end."""
    ours, theirs = socket.socketpair()
    microseconds = int(send_s * 1e6)
    limit = struct.pack("ll", *divmod(microseconds, 1_000_000))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return Connection(ours.detach()), theirs


class OtherRank(ABC):
    """One other rank: `control` for messages in both directions, `steps` for steps."""

    control: Connection
    steps: Connection

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.said: dict[type, Any] = {}
        """The messages of its start."""
        self.why = ""
        """Why it ends, as it has said."""
        self.liveness = Liveness()
        self._status: RankStatus | None = None
        self.has_lost_contact = False
        self._hangs = ""
        self.is_read = threading.Event()
        """Its reader has taken all messages, behind which it has ended."""
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"rank {self.rank.index}"

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it runs, for operators, such as "process 123"."""

    @property
    def has_come(self) -> bool:
        """Whether it takes messages."""
        return True

    @property
    def status(self) -> RankStatus | None:
        """Its last, which it sends with an answer; None before the first."""
        answers = self.liveness.num_unanswered * PING_S <= QUIET_S
        return self._status and replace(self._status, answers=answers)

    def on_pong(self, pong: Pong) -> None:
        self.liveness.answered(pong.progress)
        self._status = pong.status

    def send(self, message: object) -> None:
        """Sends a message, from any thread, or kills a rank that takes none for SILENCE_S. Its
        reader notices its end."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._lock:
                self.control.send_bytes(data)
        except OSError as error:  # it hangs, or has ended
            if error.errno in (errno.EAGAIN, errno.ETIMEDOUT):
                self.kill()

    def receive(self) -> Any:
        """Returns its next message. Raises EOFError or OSError when it has ended."""
        return pickle.loads(self.control.recv_bytes())

    @abstractmethod
    def kill(self, why: str = "does not answer") -> None:
        """Kills a rank that hangs."""

    @abstractmethod
    def end(self, timeout_s: float) -> str:
        """Waits for its end, after so long by killing it; returns how it ended."""

    def _ending(self, how: str) -> str:
        """Returns how it has ended: as it has said, or `how` it looks."""
        if self._hangs:
            return self._hangs
        if self.why:
            return f"failed: {self.why}"
        return "lost contact with another rank" if self.has_lost_contact else how

    def hang_up(self) -> None:
        """Has it end, which it does when these sockets do."""
        for each in (self.steps, self.control):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the sockets of a rank that has ended."""
        with self._lock:
            self.control.close()
        self.steps.close()


class RankProcess(OtherRank):
    """A rank of this machine. It ends with the thread that makes it."""

    def __init__(self, rank: Rank, files: tuple[int, ...] = ()) -> None:
        """`files` are open in its process, too."""
        super().__init__(rank)
        self.control, theirs = _pair(SILENCE_S)
        self.steps, their_steps = _pair(EXCHANGE_S)
        self.steps_fd = their_steps.fileno()
        with theirs, their_steps:
            try:
                self._process = subprocess.Popen(
                    rank_command("inference_svc.engine.ranks.main"),
                    stdin=theirs.fileno(),
                    pass_fds=(self.steps_fd, *files),
                )
            except BaseException:
                self.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def place(self) -> str:
        return f"process {self.pid}"

    def kill(self, why: str = "does not answer") -> None:
        if not self._hangs and self._process.poll() is None:
            self._hangs = why
        self._process.kill()

    def end(self, timeout_s: float) -> str:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        if not self._hangs:
            self.is_read.wait(DEATH_S)
        if code < 0:
            return self._ending(f"was ended by {signal.Signals(-code).name}")
        return self._ending(f"ended with status {code}")

    def discard(self) -> None:
        """Ends a rank that nobody has heard yet, and closes its sockets."""
        self._process.kill()
        self._process.wait()
        self.close()


def start_ranks(indices: Sequence[int], count: int, files: tuple[int, ...]) -> list[RankProcess]:
    """Starts ranks of this machine, all or none; see RankProcess."""
    with contextlib.ExitStack() as unused:
        found: list[RankProcess] = []
        for index in indices:
            found.append(RankProcess(Rank(index, count), files))
            unused.callback(found[-1].discard)
        unused.pop_all()
        return found
