"""The process's own accepted sockets are found, measured, reset, and refused in the kernel."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from servicekit.rpc import syn_filter
from servicekit.rpc.sockets import Accepted, AcceptedSockets, Peer, peer_of_call
from tests.support.machine.limits import no_files_left
from tests.support.wait import until


@pytest.fixture(params=["127.0.0.1", "::"])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    is_dual = ":" in request.param
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server((request.param, 0), family=family, dualstack_ipv6=is_dual) as made:
        yield made


def read(sockets: AcceptedSockets) -> list[Accepted]:
    found = sockets.read()
    assert found is not None
    return found


def connect(listening: socket.socket, source: str = "127.0.0.1") -> socket.socket:
    port = listening.getsockname()[1]
    return socket.create_connection(("127.0.0.1", port), 0.5, source_address=(source, 0))


def test_only_accepted_sockets_of_the_port_are_found(listening: socket.socket) -> None:
    """A client of IPv4 has one name, also where IPv6 listens."""
    sockets = AcceptedSockets(listening.getsockname()[1])
    with ExitStack() as stack:
        other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(connect(other))
        stack.enter_context(other.accept()[0])
        assert read(sockets) == []
        client = stack.enter_context(connect(listening))
        accepted, _ = listening.accept()
        (found,) = read(sockets)
        assert found.peer == Peer("127.0.0.1", client.getsockname()[1])
        client.sendall(b"x" * 1000)
        until(lambda: found.received_bytes() == 1000)
        accepted.close()
        assert read(sockets) == []
        assert found.received_bytes() == 0


def test_a_reset_connection_has_nothing_left_to_read(listening: socket.socket) -> None:
    """What has arrived would be read on after a shutdown. A file that has become another socket
    is left alone."""
    sockets = AcceptedSockets(listening.getsockname()[1])
    with connect(listening) as client:
        accepted, _ = listening.accept()
        client.sendall(b"x" * 1000)
        (found,) = read(sockets)
        until(lambda: found.received_bytes() == 1000)
        sockets.reset(found)
        with pytest.raises(OSError, match=r"reset|not connected"):
            accepted.recv(10)
        with pytest.raises(ConnectionResetError):
            client.recv(10)
        accepted.close()
    with connect(listening) as client:
        accepted, _ = listening.accept()
        assert accepted.fileno() == found.file
        sockets.reset(found)
        client.sendall(b"x")
        assert accepted.recv(10) == b"x"
        accepted.close()


def test_refused_networks_wait_and_others_do_not(listening: socket.socket) -> None:
    sockets = AcceptedSockets(listening.getsockname()[1])
    with connect(listening, "127.0.0.2") as before:
        accepted, _ = listening.accept()
        sockets.read()
        assert sockets.refuse(("127.0.0.2", "10.0.0.1", "2001:db8::1"))
        with pytest.raises(TimeoutError):
            connect(listening, "127.0.0.2")
        connect(listening, "127.0.0.3").close()
        before.sendall(b"x")  # a connection that exists notices nothing
        assert accepted.recv(10) == b"x"
        accepted.close()
    assert sockets.refuse(())
    connect(listening, "127.0.0.2").close()


def test_single_addresses_of_ipv6_are_refused() -> None:
    """Pods of a cluster's subnet share 64 bits or more, and have different owners."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        port = listening.getsockname()[1]
        sockets = AcceptedSockets(port)
        read(sockets)
        neighbours = ("::2", "::1:1", "0:0:1::1", "1::1")
        assert sockets.refuse(("127.0.0.1", *neighbours, "::1"))
        with pytest.raises(TimeoutError):
            socket.create_connection(("::1", port), 0.3)
        assert sockets.refuse(neighbours)
        socket.create_connection(("::1", port), 5).close()
        sockets.close()


def test_the_first_of_too_many_addresses_are_refused(listening: socket.socket) -> None:
    sockets = AcceptedSockets(listening.getsockname()[1])
    read(sockets)
    many = [f"2001:db8::{number:x}" for number in range(1000)]
    assert sockets.refuse(["127.0.0.2", *many, "127.0.0.3"])
    with pytest.raises(TimeoutError):
        connect(listening, "127.0.0.2")
    connect(listening, "127.0.0.3").close()
    sockets.close()


def test_a_filter_that_the_system_refuses_is_tried_again(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sockets = AcceptedSockets(listening.getsockname()[1])
    read(sockets)
    with monkeypatch.context() as patched:
        patched.setattr(syn_filter, "_ATTACH", 9999)
        assert not any(sockets.refuse(("127.0.0.2",)) for _ in range(3))
    assert len(caplog.records) == 1
    connect(listening, "127.0.0.2").close()
    assert sockets.refuse(("127.0.0.2",))
    with pytest.raises(TimeoutError):
        connect(listening, "127.0.0.2")
    sockets.close()


def test_sockets_are_found_and_reset_without_files_left(listening: socket.socket) -> None:
    sockets = AcceptedSockets(listening.getsockname()[1])
    assert read(sockets) == []
    with connect(listening) as client:
        accepted, _ = listening.accept()
        with no_files_left():
            (found,) = read(sockets)
            sockets.reset(found)
        with pytest.raises(ConnectionResetError):
            client.recv(10)
        accepted.close()
    sockets.close()
    sockets.close()


def test_nothing_is_said_of_sockets_that_cannot_be_listed(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = AcceptedSockets(listening.getsockname()[1])
    monkeypatch.setattr("servicekit.rpc.sockets._FILES", "/no/such/folder")
    assert sockets.read() is None


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:10.0.0.1:4711", Peer("10.0.0.1", 4711)),
        ("ipv6:%5B2001:db8::1%5D:4711", Peer("2001:db8::1", 4711)),
        ("ipv6:[::ffff:10.0.0.1]:4711", Peer("10.0.0.1", 4711)),
        ("unix:", None),
        ("ipv4:here:4711", None),
    ],
)
def test_grpcs_names_of_peers(text: str, peer: Peer | None) -> None:
    assert peer_of_call(text) == peer
