"""Rank 0's side of several nodes: waits for the ranks of the other nodes.

Each of them makes two connections, proves that it knows the secret, and says what its node computes
with. A stranger, or a rank that differs, is logged and dropped, and delays nobody.
"""

from __future__ import annotations

import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inference_svc.backends.exchange import Meeting
from inference_svc.core import EngineConfig, Nodes
from inference_svc.engine.ranks.nodes.connections import as_connection, limit_time
from inference_svc.engine.ranks.nodes.facts import differences
from inference_svc.engine.ranks.nodes.handshake import HANDSHAKE_S, Call, HandshakeFailed, answer
from inference_svc.engine.ranks.nodes.messages import MAX_COMING_BYTES, Coming, Refused, Welcome
from inference_svc.engine.ranks.nodes.remote import RemoteRank
from inference_svc.errors import EngineFailed
from inference_svc.model.description import Rank
from servicekit.errors import ShareExceeded
from servicekit.settings.addresses import split_address
from servicekit.shares import Reservation, Shares

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""How soon the end is noticed."""
RESOLVE_S = 2.0
"""Between two questions for the rendezvous's address."""
MAX_CALLERS, PEER_SHARE = 64, 0.5
"""Connections whose callers are not known yet, and the share of one address in the places that
others leave free. Further ones are closed; ranks come again."""
MAX_WARNINGS = 100
"""Further strangers are logged at a lower level."""


class NodeRendezvous:
    """A `Rendezvous` at an address of this machine, from which all other nodes' ranks come."""

    def __init__(self, config: EngineConfig, facts: Mapping[str, str]) -> None:
        """Listens. Raises OSError that names the setting."""
        assert config.nodes is not None
        self._nodes, self._facts = config.nodes, facts
        count, num_local = config.num_ranks, len(config.local_ranks)
        self.others = [
            RemoteRank(Rank(index, count), index // num_local) for index in range(num_local, count)
        ]
        self._listener = _listen(config.nodes)
        self._places = Shares("rendezvous connections", MAX_CALLERS, PEER_SHARE)
        self._steps: dict[int, tuple[bytes, socket.socket]] = {}
        """The connections for steps of ranks whose others have not come yet."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_warnings = 0
        self._refusals: dict[int, str] = {}
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return str(self._listener.getsockname()[0])

    def open(
        self, meeting: Meeting, backend: str, on_missing: Callable[[EngineFailed], None]
    ) -> None:
        welcome = Welcome(backend, meeting)
        self._thread = threading.Thread(
            target=self._wait, args=(welcome, on_missing), name="loadout-rendezvous", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        self._end()

    def _end(self) -> None:
        self._listener.close()
        with self._lock:
            for _, connection in self._steps.values():
                connection.close()
            self._steps.clear()

    @property
    def _missing(self) -> Sequence[RemoteRank]:
        return [each for each in self.others if not each.has_come]

    def _wait(self, welcome: Welcome, on_missing: Callable[[EngineFailed], None]) -> None:
        """Takes connections until all ranks have come."""
        nodes = self._nodes
        deadline_s = time.monotonic() + nodes.timeout_s
        where = f"{nodes.rendezvous}, for at most {nodes.timeout_s:g} s"
        logger.info("waiting for %s at %s", _names(self.others), where)
        while (missing := self._missing) and not self._is_closed:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                on_missing(self._not_come(missing))
                break
            self._listener.settimeout(min(left_s, POLL_S))
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # such as too many open files: whoever calls comes again
                self._warn("an unknown address", error.strerror or str(error))
                time.sleep(POLL_S)
                continue
            self._take(connection, peer, welcome)
        self._end()

    def _not_come(self, missing: Sequence[RemoteRank]) -> EngineFailed:
        timeout_s = self._nodes.timeout_s
        why = f"{_names(missing)} did not come to {self._nodes.rendezvous} within {timeout_s:g} s"
        refusals = [self._refusals[index] for index in sorted(self._refusals)]
        return EngineFailed("; ".join((why, *refusals)))

    def _take(self, connection: socket.socket, peer: Any, welcome: Welcome) -> None:
        address = str(peer[0])
        try:
            place = self._places.reserve(address)
        except ShareExceeded:
            self._warn(address, "too many of its address are there already")
            connection.close()
            return
        threading.Thread(
            target=self._meet,
            args=(connection, address, place, welcome),
            name="loadout-caller",
            daemon=True,
        ).start()

    def _meet(
        self, connection: socket.socket, address: str, place: Reservation, welcome: Welcome
    ) -> None:
        with place:
            try:
                call, accept = answer(connection, self._nodes.token, HANDSHAKE_S)
                if call.is_control:
                    accept()
                    self._accept(connection, call, address, welcome)
                else:
                    self._keep_steps(connection, call)
                    accept()
            except Exception as error:  # such as a message of another version
                self._warn(address, str(error) or "it closed the connection")
                connection.close()

    def _keep_steps(self, connection: socket.socket, call: Call) -> None:
        with self._lock:
            before = self._steps.pop(call.rank, None)
            if before is not None:
                before[1].close()
            if self._is_closed:
                raise HandshakeFailed("the rendezvous is over")
            self._steps[call.rank] = call.session, connection

    def _accept(self, control: socket.socket, call: Call, address: str, welcome: Welcome) -> None:
        """Lets a rank come whose node agrees. The caller knows the secret."""
        control.settimeout(None)
        limit_time(control, socket.SO_RCVTIMEO, HANDSHAKE_S)
        limit_time(control, socket.SO_SNDTIMEO, HANDSHAKE_S)
        messages = as_connection(control.dup())
        with messages:
            coming = pickle.loads(messages.recv_bytes(MAX_COMING_BYTES))
            assert isinstance(coming, Coming)
            why = differences(self._facts, coming.facts)
            with self._lock:
                session, steps = self._steps.pop(call.rank, (b"", None))
            if call.rank not in [each.rank.index for each in self._missing]:
                why = f"rank {call.rank} has come already, or is not of another node"
            elif steps is None or session != call.session:
                why = "its two connections are not of one rank"
            if why:
                self._refuse(call.rank, address, why)
                messages.send_bytes(pickle.dumps(Refused(why)))
                control.close()
                if steps is not None:
                    steps.close()
                return
            assert steps is not None
            messages.send_bytes(pickle.dumps(welcome))
        limit_time(control, socket.SO_RCVTIMEO, 0.0)
        [rank] = [each for each in self.others if each.rank.index == call.rank]
        if not rank.attach(control, steps, f"process {coming.process_id} at {address}"):
            control.close()
            steps.close()

    def _refuse(self, index: int, address: str, why: str) -> None:
        with self._lock:
            is_new = self._refusals.get(index) != why
            self._refusals[index] = f"rank {index} at {address} was refused: {why}"
        level = logging.ERROR if is_new else logging.DEBUG
        logger.log(level, "rank %d at %s is refused: %s", index, address, why)

    def _warn(self, address: str, why: str) -> None:
        with self._lock:
            self._num_warnings += 1
            level = logging.WARNING if self._num_warnings <= MAX_WARNINGS else logging.DEBUG
        logger.log(level, "a connection from %s to the rendezvous is dropped: %s", address, why)


def _listen(nodes: Nodes) -> socket.socket:
    try:
        family, _, _, _, address = _resolve(nodes)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        why = error.strerror or str(error)
        hint = "it must be an address of this machine, node 0"
        raise OSError(
            f"--rendezvous: cannot listen on {nodes.rendezvous}: {why}; {hint}"
        ) from error


def _resolve(nodes: Nodes) -> list[Any]:
    """Resolves the rendezvous, again for a while: where pods have names, a new one's may come after
    its start."""
    host, port = split_address(nodes.rendezvous)
    deadline_s = time.monotonic() + nodes.timeout_s
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if time.monotonic() > deadline_s:
                raise
            logger.warning("%s has no address yet: %s", host, error.strerror)
        time.sleep(RESOLVE_S)


def _names(ranks: Sequence[RemoteRank]) -> str:
    return ", ".join(each.name for each in ranks)
