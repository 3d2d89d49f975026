"""The ranks of another node, started and watched: the first that ends, ends all."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from inference_svc.backends.base import RankFactory
from inference_svc.backends.select import select_backend
from inference_svc.core import EngineConfig
from inference_svc.engine.build import describe
from inference_svc.engine.memory_budget import check_budgets, check_host_budget
from inference_svc.engine.ranks.nodes.facts import facts_of
from inference_svc.engine.ranks.nodes.messages import Joined, NotJoined, NotReady, Orders
from inference_svc.engine.ranks.orphans import rank_command
from inference_svc.engine.ranks.peers import PING_S, SILENCE_S
from inference_svc.engine.transport.process_main import encode
from inference_svc.model.description import Rank

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How soon the end of all ranks is noticed."""


class NodeRank:
    """One rank's process. It ends with the thread that makes it, and is killed if it hangs once it
    has joined: rank 0 gives it up, but cannot end it. `on_change` is called, from any thread, when
    it has joined, and when it has ended."""

    def __init__(self, orders: Orders, on_change: Callable[[], None]) -> None:
        self._name = f"rank {orders.rank.index}"
        self._on_change = on_change
        self.has_joined = False
        self.ending = ""
        """How it has ended."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unused:
            unused.callback(ours.close)
            self._process = subprocess.Popen(
                rank_command("inference_svc.engine.ranks.nodes.main"), stdin=theirs.fileno()
            )
            unused.pop_all()
        self._connection = Connection(ours.detach())
        with contextlib.suppress(OSError):  # it has ended: its reader finds out
            self._connection.send_bytes(encode(orders))
        self._reader = threading.Thread(
            target=self._read, name=f"loadout-{self._name}", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        why, hangs = "", False
        with contextlib.suppress(EOFError, OSError):
            while True:
                hangs = hangs or not self._answers()
                message = pickle.loads(self._connection.recv_bytes())
                if isinstance(message, NotReady):
                    logger.info("%s waits for rank 0: %s", self._name, message.why)
                elif isinstance(message, NotJoined):
                    why = message.why
                elif isinstance(message, Joined):
                    logger.info("%s, process %d, has joined", self._name, self.pid)
                    self.has_joined = True
                    self._on_change()
        how = self._how(self._process.wait(), why)
        self.ending = f"{self._name} {'does not answer' if hangs else how}"
        self._on_change()

    def _answers(self) -> bool:
        """Waits for its next message, or its end; kills it if none comes for SILENCE_S."""
        # Looks are counted, and not time: this process may have been stopped itself.
        for _ in range(math.ceil(SILENCE_S / PING_S)):
            if self._connection.poll(PING_S if self.has_joined else None):
                return True
        self._process.kill()
        return False

    @staticmethod
    def _how(code: int, why: str) -> str:
        if why:
            return f"ended: {why}"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return (
            f"ended with status {code}" if code else "ended, because rank 0 has, or does not answer"
        )

    def close(self) -> None:
        """Kills the process, if it has not ended."""
        self._process.kill()
        self._reader.join()
        self._connection.close()


class Node:
    """The ranks of this node. They come to rank 0, and compute for it until they end.

    Made in a thread that lives as long: they end with it. `on_change` is called, from any thread,
    when a rank has joined, or ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: dict[str, str],
        make_store: Callable[[Callable[[Any], None]], Any],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks: list[NodeRank] = []
        count = config.num_ranks
        for index in config.local_ranks:
            orders = Orders(config, Rank(index, count), make_store, facts)
            try:
                self.ranks.append(NodeRank(orders, on_change))
            except BaseException:
                self.close()
                raise

    @property
    def has_joined(self) -> bool:
        """Whether rank 0 has accepted all ranks, and none has ended."""
        return all(each.has_joined for each in self.ranks) and not self.endings

    @property
    def endings(self) -> list[str]:
        """How ranks have ended."""
        return [each.ending for each in self.ranks if each.ending]

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits until all ranks have ended, as they do when rank 0 has, for so long at most."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.endings) < len(self.ranks) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ends all ranks. Idempotent."""
        for each in self.ranks:
            each.close()


def check_node(config: EngineConfig) -> dict[str, str]:
    """Checks that this node can hold its ranks; returns its facts. This process asks no device,
    which takes memory of it. Raises UnsupportedModel, OSError and ValueError."""
    decoder = describe(config, config.local_ranks[0])
    factory = select_backend(config, decoder)
    assert isinstance(factory, RankFactory), "it computes a rank's part"
    if factory.has_device_memory:
        check_host_budget(config)
    else:
        check_budgets(config, decoder, factory)
    return facts_of(config)
