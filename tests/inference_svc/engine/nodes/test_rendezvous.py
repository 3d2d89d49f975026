"""Ranks of other nodes come to rank 0; strangers and ranks that differ are dropped."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_svc.core import EngineConfig, Nodes
from inference_svc.engine.ranks.liveness import progress
from inference_svc.engine.ranks.messages import Ping, Pong
from inference_svc.engine.ranks.nodes import handshake, main, rendezvous
from inference_svc.engine.ranks.nodes import remote as remote_rank
from inference_svc.engine.ranks.nodes.handshake import Call, call
from inference_svc.engine.ranks.nodes.main import Accepted, NotAccepted, come
from inference_svc.engine.ranks.nodes.messages import Orders
from inference_svc.engine.ranks.nodes.rendezvous import NodeRendezvous
from inference_svc.engine.ranks.report import Report
from inference_svc.errors import EngineFailed
from inference_svc.model.description import Rank
from servicekit.settings.addresses import split_address
from tests.support.inference.ranks import no_store
from tests.support.wait import until

TOKEN = "a secret of all nodes"
FACTS = {"--dtype": "float32", "the model's config.json": "0123"}


def config_of(port: int, index: int, timeout_s: float = 20.0) -> EngineConfig:
    nodes = Nodes(2, index, f"127.0.0.1:{port}", timeout_s, TOKEN)
    return EngineConfig(Path("model"), "model", tensor_parallel=4, nodes=nodes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Waiting:
    """A rendezvous that waits for ranks 2 and 3."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.port = free_port()
        self.rendezvous = NodeRendezvous(config_of(self.port, 0, timeout_s), FACTS)
        self.missed: list[EngineFailed] = []
        meeting: Any = "meeting"
        self.rendezvous.open(meeting, "native", self.missed.append)

    @property
    def present(self) -> list[int]:
        return [each.rank.index for each in self.rendezvous.others if each.has_come]

    def orders(self, index: int, facts: dict[str, str] = FACTS, timeout_s: float = 20.0) -> Orders:
        return Orders(config_of(self.port, 1, timeout_s), Rank(index, 4), no_store, facts)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 10)

    def come(self, index: int) -> Accepted:
        return come(self.orders(index), lambda why: None)


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.rendezvous.close()
    for each in made.rendezvous.others:
        each.hang_up()
        each.close()


def close(accepted: Accepted) -> None:
    accepted.control.close()
    socket.socket(fileno=accepted.steps_fd).close()


def test_ranks_come(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    """They speak with rank 0, which listens no more when all are there."""
    second = waiting.come(3)
    until(lambda: waiting.present == [3])
    first = waiting.come(2)
    until(lambda: waiting.present == [2, 3])
    assert first.welcome == second.welcome
    assert first.welcome.backend == "native"
    assert str(first.welcome.meeting) == "meeting"
    remote = waiting.rendezvous.others[0]
    assert remote.name == "rank 2 on node 1"
    assert remote.place.endswith("at 127.0.0.1")
    remote.send(Ping())
    assert pickle.loads(first.control.recv_bytes()) == Ping()
    pong = Pong(progress(), Report(Rank(2, 4), 1).status(0, 0))
    first.control.send_bytes(pickle.dumps(pong))
    assert remote.receive() == pong
    remote.steps.send_bytes(b"step")
    with socket.socket(fileno=first.steps_fd) as steps:
        assert steps.recv(100) == struct.pack("!i", 4) + b"step"
    until(lambda: _refuses(waiting.port))
    first.control.close()
    close(second)
    with pytest.raises(EOFError):
        remote.receive()
    assert not waiting.missed


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_strangers_delay_nobody(
    waiting: Waiting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One says nothing, one garbage, one too much, and one has another token; each is logged, and
    is closed within the time of a handshake."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 2.0)
    silent, loud, long, other = (waiting.connect() for _ in range(4))
    with silent, loud, long, other:
        loud.sendall(b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n")
        with pytest.raises(OSError, match=r"Broken pipe|reset by peer"):
            long.sendall(bytes(64 << 20))
        with pytest.raises(handshake.HandshakeFailed, match="RENDEZVOUS_TOKEN"):
            call(other, "another secret of nodes", Call(2, True, bytes(16)))
        assert waiting.present == []
        accepted = waiting.come(2)
        until(lambda: waiting.present == [2])
        silent.settimeout(20)
        while silent.recv(100):
            pass  # until it is closed
    close(accepted)
    said = [each.getMessage() for each in caplog.records if "is dropped" in each.getMessage()]
    assert all(each.startswith("a connection from 127.0.0.1") for each in said)
    for why in ("says nothing", "does not speak as a rank", "RENDEZVOUS_TOKEN is another"):
        assert any(why in each for each in said), why


def test_many_strangers(waiting: Waiting) -> None:
    """They take half of the places; a rank comes again until one is free."""
    strangers = [waiting.connect() for _ in range(100)]
    found: list[Accepted] = []
    coming = threading.Thread(target=lambda: found.append(waiting.come(2)))
    coming.start()
    for each in strangers:
        each.close()
    coming.join(20)
    until(lambda: waiting.present == [2])
    close(found[0])


def test_no_file_is_left_for_a_caller(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    """The rendezvous goes on waiting, and a rank that comes later is taken."""
    unused = os.open(os.devnull, os.O_RDONLY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as caller:
        os.close(unused)
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused, limits[1]))
        try:
            caller.connect(("127.0.0.1", waiting.port))
            until(lambda: "from an unknown address" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    close(waiting.come(2))
    until(lambda: waiting.present == [2])


def test_a_rank_that_differs(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    facts = FACTS | {"--dtype": "bfloat16"}
    expected = "--dtype is bfloat16, and float32 on rank 0"
    with pytest.raises(NotAccepted, match=f"refuses this rank: {expected}"):
        come(waiting.orders(2, facts), lambda why: None)
    until(lambda: f"rank 2 at 127.0.0.1 is refused: {expected}" in caplog.text)
    assert waiting.present == []
    close(waiting.come(2))


@pytest.mark.parametrize("index", [1, 2, 4])
def test_a_rank_that_is_not_missing(waiting: Waiting, index: int) -> None:
    """One is of this node, one has come, and one is of none."""
    accepted = waiting.come(2)
    until(lambda: waiting.present == [2])
    with pytest.raises(NotAccepted, match=f"rank {index} has come already, or is not of another"):
        come(waiting.orders(index), lambda why: None)
    close(accepted)


def test_connections_of_two_ranks(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of one rank do not become one."""
    with waiting.connect() as steps:
        call(steps, TOKEN, Call(2, False, bytes(16)))
        real = handshake.call

        def only_control(connection: socket.socket, token: str, purpose: Call) -> None:
            if purpose.is_control:
                real(connection, token, purpose)

        monkeypatch.setattr(main, "call", only_control)
        with pytest.raises(NotAccepted, match="not of one rank"):
            waiting.come(2)


def test_ranks_that_do_not_come(caplog: pytest.LogCaptureFixture) -> None:
    """Said once at the beginning, and in the end with the reason that is known."""
    caplog.set_level(logging.INFO)
    waiting = Waiting(timeout_s=1.5)
    with pytest.raises(NotAccepted):
        come(waiting.orders(3, {"--dtype": "float16"}), lambda why: None)
    until(lambda: waiting.missed)
    waiting.rendezvous.close()
    where = f"127.0.0.1:{waiting.port}"
    both = "rank 2 on node 1, rank 3 on node 1"
    assert caplog.text.count(f"waiting for {both} at {where}, for at most 1.5 s") == 1
    [failure] = waiting.missed
    assert f"{both} did not come to {where} within 1.5 s; rank 3 at 127.0.0.1" in str(failure)
    assert "--dtype is float16, and float32 on rank 0" in str(failure)


def test_rank_0_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tries again, says so once, and ends after the time limit."""
    monkeypatch.setattr(main, "RETRY_S", 0.05)
    said: list[str] = []
    port = free_port()
    orders = Orders(config_of(port, 1, 0.5), Rank(2, 4), no_store, FACTS)
    expected = (
        rf"127.0.0.1:{port} did not answer within --rendezvous-timeout-seconds 0.5: .*refused"
    )
    with pytest.raises(NotAccepted, match=expected):
        come(orders, said.append)
    assert len(said) == 1


def test_an_address_of_another_machine() -> None:
    config = config_of(1, 0)
    assert config.nodes is not None
    away = replace(config, nodes=replace(config.nodes, rendezvous="192.0.2.1:29500"))
    with pytest.raises(OSError, match=r"--rendezvous: cannot listen on 192.0.2.1:29500: .* node 0"):
        NodeRendezvous(away, FACTS)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"--rendezvous: cannot listen on 127.0.0.1:{port}"):
            NodeRendezvous(config_of(port, 0), FACTS)
    assert split_address(f"127.0.0.1:{port}")[1] == port


def test_a_name_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RESOLVE_S", 0.01)
    real = socket.getaddrinfo
    asked: list[str] = []

    def resolve(host: str, port: int, **options: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = config_of(free_port(), 0)
    assert config.nodes is not None
    named = replace(config.nodes, rendezvous=f"leader.test:{free_port()}")
    NodeRendezvous(replace(config, nodes=named), FACTS).close()
    assert asked == ["leader.test"] * 3
    asked.clear()
    with pytest.raises(OSError, match=r"--rendezvous: cannot listen on .* Name or service not"):
        NodeRendezvous(replace(config, nodes=replace(named, timeout_s=0.0)), FACTS)


def test_a_rank_0_that_says_nothing(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, and its system still answers for it: the rank does not wait for it."""
    monkeypatch.setattr(main, "SILENCE_S", 0.5)
    accepted = waiting.come(2)
    until(lambda: waiting.present == [2])
    waiting.rendezvous.others[0].send(Ping())
    assert pickle.loads(accepted.control.recv_bytes()) == Ping()
    with pytest.raises(BlockingIOError):
        accepted.control.recv_bytes()
    close(accepted)


def read_all(waiting: Waiting, index: int) -> threading.Thread:
    """Takes a rank's messages, as rank 0 does, until it has ended."""
    remote = waiting.rendezvous.others[index]

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                remote.receive()
        remote.is_read.set()

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_a_rank_that_is_given_up(waiting: Waiting) -> None:
    """It notices."""
    accepted = waiting.come(2)
    until(lambda: waiting.present == [2])
    remote, reader = waiting.rendezvous.others[0], read_all(waiting, 0)
    remote.kill()
    with pytest.raises(EOFError):
        accepted.control.recv_bytes()
    assert remote.end(20.0) == "does not answer"
    reader.join(20)
    close(accepted)


def test_a_rank_that_takes_no_messages(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill its connection: it is given up, and later ones do not wait."""
    monkeypatch.setattr(remote_rank, "SILENCE_S", 0.5)
    accepted = waiting.come(2)
    until(lambda: waiting.present == [2])
    remote, reader = waiting.rendezvous.others[0], read_all(waiting, 0)
    for _ in range(100):
        remote.send(bytes(1 << 20))
    assert remote.end(20.0) == "does not answer"
    reader.join(20)
    close(accepted)


def test_a_rank_that_closes_its_connections(waiting: Waiting) -> None:
    accepted = waiting.come(2)
    until(lambda: waiting.present == [2])
    reader = read_all(waiting, 0)
    close(accepted)
    assert waiting.rendezvous.others[0].end(20.0) == "closed its connection"
    reader.join(20)


def test_a_rank_that_never_comes_is_closed(waiting: Waiting) -> None:
    """Its reader ends, and nothing is sent."""
    remote, reader = waiting.rendezvous.others[1], read_all(waiting, 1)
    remote.send(Ping())
    remote.hang_up()
    reader.join(20)
    assert not reader.is_alive()
    with pytest.raises(NotAccepted):
        come(waiting.orders(3, timeout_s=0.5), lambda why: None)
