"""The main program of a rank of another node: comes to rank 0, and computes its part of steps."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NamedTuple

from inference_svc.backends.base import RankFactory
from inference_svc.backends.select import select_backend
from inference_svc.core import Nodes
from inference_svc.engine.build import config_of_rank, describe
from inference_svc.engine.ranks.main import Follower
from inference_svc.engine.ranks.messages import Start
from inference_svc.engine.ranks.nodes.connections import limit_time, prepare
from inference_svc.engine.ranks.nodes.facts import computing_of
from inference_svc.engine.ranks.nodes.handshake import HANDSHAKE_S, Call, HandshakeFailed, call
from inference_svc.engine.ranks.nodes.messages import (
    Alive,
    Coming,
    Joined,
    NotJoined,
    NotReady,
    Orders,
    Refused,
    Welcome,
)
from inference_svc.engine.ranks.peers import PING_S, SILENCE_S
from inference_svc.engine.transport.process_main import connect_to_parent, encode
from inference_svc.host.device_info import use_device
from servicekit.errors import ServiceError
from servicekit.settings.addresses import split_address

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries to reach rank 0, which may start later, or again."""


class NotAccepted(Exception):
    """Rank 0 was not reached in time, or does not accept this rank."""


class FromRankZero(Connection):
    """The connection for messages, which says why it ends."""

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        try:
            return super().recv_bytes(maxlength)
        except BlockingIOError:
            logger.error("rank 0 has not said anything for %g s: this rank ends", SILENCE_S)
            raise
        except (EOFError, OSError):
            logger.warning("rank 0 has closed the connection: this rank ends")
            raise


class Accepted(NamedTuple):
    """The connections of a rank that rank 0 has accepted, and its answer."""

    control: Connection
    steps_fd: int
    welcome: Welcome


def main() -> None:
    parent = connect_to_parent()
    try:
        orders = pickle.loads(parent.recv_bytes())
        assert isinstance(orders, Orders)
        try:
            orders = with_computing(orders)
        except (ServiceError, RuntimeError, ValueError, OSError) as error:
            parent.send_bytes(encode(NotJoined(str(error))))
            os._exit(1)
        try:
            accepted = come(orders, lambda why: parent.send_bytes(encode(NotReady(why))))
        except NotAccepted as error:
            parent.send_bytes(encode(NotJoined(str(error))))
            os._exit(1)
        parent.send_bytes(encode(Joined()))
    except (EOFError, OSError):
        os._exit(1)  # the node's process has ended
    threading.Thread(target=_say_alive, args=(parent,), name="loadout-alive", daemon=True).start()
    welcome = accepted.welcome
    start = Start(
        orders.config,
        orders.rank,
        orders.make_store,
        welcome.backend,
        welcome.meeting,
        accepted.steps_fd,
    )
    Follower(accepted.control, start).run()


def with_computing(orders: Orders) -> Orders:
    """Adds to the facts what this rank computes with. Raises UnsupportedModel, ValueError, OSError
    for files that cannot be read, and RuntimeError for a device that does not answer."""
    index = orders.rank.index
    config = config_of_rank(orders.config, index)
    use_device(config.device)
    factory = select_backend(config, describe(config, index))
    assert isinstance(factory, RankFactory), "its node has checked it"
    return replace(orders, facts=orders.facts | computing_of(factory))


def _say_alive(parent: Connection) -> None:
    """Says so to the node's process until that has ended, and this one with it."""
    with contextlib.suppress(OSError):
        while True:
            parent.send_bytes(encode(Alive()))
            time.sleep(PING_S)


def come(orders: Orders, on_not_ready: Callable[[str], None]) -> Accepted:
    """Comes to rank 0, again until it is there. Raises NotAccepted."""
    nodes = orders.config.nodes
    assert nodes is not None
    deadline_s = time.monotonic() + nodes.timeout_s
    said = ""
    while True:
        try:
            return _come_once(orders, nodes)
        except (HandshakeFailed, EOFError, OSError) as error:
            why = str(error) or "it closed the connection"
        if why != said:
            on_not_ready(why)
            said = why
        if time.monotonic() > deadline_s:
            waited = f"within --rendezvous-timeout-seconds {nodes.timeout_s:g}"
            raise NotAccepted(f"rank 0 at {nodes.rendezvous} did not answer {waited}: {why}")
        time.sleep(RETRY_S)


def _come_once(orders: Orders, nodes: Nodes) -> Accepted:
    session, index = secrets.token_bytes(16), orders.rank.index
    with _connect(nodes) as steps, _connect(nodes) as control:
        call(steps, nodes.token, Call(index, False, session))
        call(control, nodes.token, Call(index, True, session))
        for each in (steps, control):
            prepare(each, SILENCE_S)
        limit_time(control, socket.SO_RCVTIMEO, HANDSHAKE_S)
        with FromRankZero(control.dup().detach()) as messages:
            messages.send_bytes(encode(Coming(orders.facts, os.getpid())))
            found = pickle.loads(messages.recv_bytes())
        if isinstance(found, Refused):
            raise NotAccepted(f"rank 0 at {nodes.rendezvous} refuses this rank: {found.why}")
        # It sends pings.
        limit_time(control, socket.SO_RCVTIMEO, SILENCE_S)
        return Accepted(FromRankZero(control.detach()), steps.detach(), found)


def _connect(nodes: Nodes) -> socket.socket:
    return socket.create_connection(split_address(nodes.rendezvous), HANDSHAKE_S)
