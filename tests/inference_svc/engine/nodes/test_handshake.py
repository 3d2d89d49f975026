"""Both sides of a connection prove that they know the secret, and read little before that."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.engine.ranks.nodes.handshake import Call, HandshakeFailed, answer, call

TOKEN = "a secret of all nodes"
PURPOSE = Call(3, True, bytes(range(16)))
HELLO_BYTES, ANSWER_BYTES = 16 + 32, 32
CALL_BYTES = 16 + 32 + 19 + 32


class Answering:
    """The listener's side of a connection, in a thread."""

    def __init__(self, connection: socket.socket, token: str = TOKEN) -> None:
        self._connection, self._token = connection, token
        self.call: Call | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        try:
            self.call, accept = answer(self._connection, self._token, 1.0)
            accept()
        except (HandshakeFailed, OSError) as error:
            self.error = error
            self._connection.close()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def answering(token: str = TOKEN) -> Iterator[tuple[socket.socket, Answering]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = Answering(theirs, token)
        try:
            yield ours, made
        finally:
            made.join()


def test_both_know_the_secret() -> None:
    with answering() as (connection, made):
        call(connection, TOKEN, PURPOSE)
    assert made.call == PURPOSE


def test_a_caller_with_another_secret() -> None:
    with (
        answering("another secret of nodes") as (connection, made),
        pytest.raises(HandshakeFailed, match="is its LOADOUT_INFERENCE_RENDEZVOUS_TOKEN"),
    ):
        call(connection, TOKEN, PURPOSE)
    assert made.call is None
    assert "RENDEZVOUS_TOKEN is another" in str(made.error)


def test_a_listener_that_does_not_know_the_secret() -> None:
    """It accepts every caller."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"loadout ranks 1\n" + bytes(32 + ANSWER_BYTES))
        with pytest.raises(HandshakeFailed, match="does not know the secret"):
            call(ours, TOKEN, PURPOSE)


def test_a_listener_that_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(HandshakeFailed, match="is no rank"):
            call(ours, TOKEN, PURPOSE)
        theirs.settimeout(0.05)
        with pytest.raises(TimeoutError):
            theirs.recv(1)  # it gets no proof


@given(said=st.binary(max_size=300))
def test_garbage(said: bytes) -> None:
    """At most a call's bytes are read."""
    with answering() as (connection, made):
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
    assert made.call is None
    assert isinstance(made.error, HandshakeFailed | OSError)


@given(data=st.data())
def test_a_changed_call(data: st.DataObject) -> None:
    """Every bit counts: of the purpose, of the nonce, and of the proof."""
    ours, theirs = socket.socketpair()
    sent, other = socket.socketpair()
    with ours, theirs, sent, other, answering() as (connection, made):
        hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        caller = threading.Thread(target=_call_and_fail, args=(ours,))
        caller.start()
        theirs.sendall(hello)
        said = bytearray(theirs.recv(CALL_BYTES, socket.MSG_WAITALL))
        at = data.draw(st.integers(0, len(said) - 1))
        said[at] ^= 1 << data.draw(st.integers(0, 7))
        connection.sendall(said)
        theirs.close()
        caller.join(20)
    assert made.call is None
    assert isinstance(made.error, HandshakeFailed)


def _call_and_fail(connection: socket.socket) -> None:
    with pytest.raises(HandshakeFailed):
        call(connection, TOKEN, PURPOSE)


def test_a_call_that_is_said_again() -> None:
    """A listener takes it once."""
    with answering() as (first, made):
        hello = first.recv(HELLO_BYTES, socket.MSG_WAITALL)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            caller = threading.Thread(target=call, args=(ours, TOKEN, PURPOSE))
            caller.start()
            theirs.sendall(hello)
            said = theirs.recv(CALL_BYTES, socket.MSG_WAITALL)
            first.sendall(said)
            theirs.sendall(first.recv(ANSWER_BYTES, socket.MSG_WAITALL))
            caller.join(20)
    assert made.call == PURPOSE
    with answering() as (second, again):
        second.sendall(said)
    assert again.call is None


def test_a_proof_that_is_sent_back() -> None:
    """Who does not know the secret cannot let the other side compute its proof."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        caller = threading.Thread(target=_call_and_fail, args=(ours,))
        caller.start()
        theirs.sendall(b"loadout ranks 1\n" + bytes(32))
        said = theirs.recv(CALL_BYTES, socket.MSG_WAITALL)
        theirs.sendall(said[-ANSWER_BYTES:])
        caller.join(20)
        assert not caller.is_alive()


@pytest.mark.parametrize("said", [b"", b"loadout ranks 1\n", b"loadout ranks 1\n" + bytes(60)])
def test_silence(said: bytes) -> None:
    """Also of one that says a little."""
    with answering() as (connection, made):
        connection.sendall(said)
        made.join()
    assert "says nothing" in str(made.error)


def test_a_caller_that_speaks_slowly() -> None:
    """The limit is for all of it, not for each part."""

    def drips_until(connection: socket.socket, is_over: Callable[[], bool]) -> bool:
        for each in b"loadout ranks 1\n" + bytes(60):
            if is_over():
                return True
            connection.send(bytes([each]))
            time.sleep(0.05)
        return False

    with answering() as (connection, made):
        assert drips_until(connection, lambda: made.error is not None)
    assert "says nothing" in str(made.error)
