"""What connections without a token may do, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from adapter_store.config import StoreSettings
from servicekit import heap
from servicekit.auth.authenticator import Authenticator
from servicekit.auth.policy import Policy, PolicyFile
from servicekit.auth.principal import Principal
from servicekit.rpc import strangers
from servicekit.rpc.interceptor import TokenInterceptor
from servicekit.rpc.places import IS_KNOWN
from servicekit.rpc.server import RpcServer
from servicekit.rpc.sockets import Accepted, AcceptedSockets
from servicekit.rpc.strangers import StrangerLimits, Strangers
from servicekit.rpc.tls import CertificateFiles
from tests.servicekit.rpc.served import REQUESTS
from tests.support.machine.limits import no_files_left
from tests.support.wait import until

LIMITS = StrangerLimits()
SETTINGS = StoreSettings()


class Port:
    """A listening port, and the strangers at it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.number = self._listening.getsockname()[1]

    def watch(self, **limits: Any) -> Strangers:
        watched = Strangers(self.number, replace(LIMITS, **limits))
        self._stack.callback(watched.close)
        return watched

    def connect(self, source: str = "127.0.0.1") -> Client:
        made = socket.create_connection(("127.0.0.1", self.number), 0.5, source_address=(source, 0))
        accepted, _ = self._listening.accept()
        self._stack.enter_context(made)
        self._stack.enter_context(accepted)
        if made.getsockname()[1] == self.number:  # by chance: another address has its own ports
            made.close()
            accepted.close()
            return self.connect(source)
        return Client(made, accepted)


class Client:
    """A connection, by both of its ends."""

    def __init__(self, made: socket.socket, accepted: socket.socket) -> None:
        self._made, self._accepted = made, accepted
        host, port = made.getsockname()
        self.peer = f"ipv4:{host}:{port}"

    @property
    def is_open(self) -> bool:
        """Whether the server has not reset it. The kernel tells the server's end at once, and the
        client's when it has delivered the reset, which a busy machine does late."""
        try:
            self._accepted.getpeername()
        except OSError:
            return False
        return True

    def hears_of_its_end(self) -> None:
        """Waits until the client's end is told of the reset."""
        self._made.settimeout(60)
        with pytest.raises(ConnectionResetError):
            self._made.recv(1)

    def close(self) -> None:
        self._made.close()
        self._accepted.close()

    def send(self, num_bytes: int) -> None:
        self._made.setblocking(True)
        self._made.sendall(bytes(num_bytes))
        remaining = num_bytes
        while remaining:
            remaining -= len(self._accepted.recv(remaining))


@pytest.fixture
def port() -> Iterator[Port]:
    with ExitStack() as stack:
        yield Port(stack)


class Clock:
    """Tells strangers the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = time.monotonic()
        told = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(strangers, "time", told)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_too_many_calls_close_a_connection_alone(port: Port) -> None:
    """One stranger takes nothing from others of its address, such as a node's probes."""
    watched = port.watch(calls=3)
    storming, other = port.connect(), port.connect()
    watched.sweep()
    assert all(watched.note_call(storming.peer, is_known=False) for _ in range(3))
    assert not watched.note_call(storming.peer, is_known=False)
    watched.sweep()
    assert [each.is_open for each in (storming, other)] == [False, True]
    storming.hears_of_its_end()
    assert not watched.note_call(storming.peer, is_known=False)
    assert watched.note_call(other.peer, is_known=False)
    probe = port.connect()
    watched.sweep()
    assert watched.note_call(probe.peer, is_known=False)


def test_too_many_calls_of_an_address_close_its_strangers(port: Port) -> None:
    """Neither those of others, nor known connections, nor a probe's, which is answered."""
    watched = port.watch(address_calls=20)
    storming, probe, known = (port.connect("127.0.0.2") for _ in range(3))
    other = port.connect()
    watched.sweep()
    assert watched.note_call(known.peer, is_known=True)
    assert all(watched.note_call(storming.peer, is_known=False) for _ in range(20))
    assert not watched.note_call(storming.peer, is_known=False)
    assert watched.note_call(probe.peer, is_known=False)
    watched.sweep()
    connections = (storming, probe, known, other)
    assert [each.is_open for each in connections] == [False, True, True, True]
    assert not watched.note_call(storming.peer, is_known=False)
    assert watched.note_call(other.peer, is_known=False)
    with pytest.raises(TimeoutError):
        port.connect("127.0.0.2")
    port.connect("127.0.0.3")


def test_a_refused_address_is_let_in_again(port: Port, clock: Clock) -> None:
    """Calls that come for long do not add up to minutes."""
    watched = port.watch(address_calls=10, address_calls_per_second=1)
    client = port.connect("127.0.0.2")
    watched.sweep()
    for _ in range(100):
        watched.note_call(client.peer, is_known=False)
    watched.sweep()
    with pytest.raises(TimeoutError):
        port.connect("127.0.0.2")
    clock.now_s += strangers.REFUSED_SECONDS + 1
    watched.sweep()
    again = port.connect("127.0.0.2")
    watched.sweep()
    assert again.is_open
    assert watched.note_call(again.peer, is_known=False)


def test_a_probe_comes_in_while_its_address_storms(
    port: Port, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "SHUT_SECONDS", (0.5, 0.5))
    watched = port.watch(address_calls=10, address_calls_per_second=0)

    def storm() -> None:
        storming = port.connect()
        for _ in range(20):
            watched.note_call(storming.peer, is_known=False)
        watched.sweep()
        assert not storming.is_open

    storm()
    with pytest.raises(TimeoutError):
        port.connect()
    clock.now_s += 0.5
    watched.sweep()
    probe = port.connect()
    watched.sweep()
    assert watched.note_call(probe.peer, is_known=False)
    storm()  # which ends the time in which others come in
    with pytest.raises(TimeoutError):
        port.connect()
    clock.now_s += 0.5 + strangers.OPEN_SECONDS
    watched.sweep()
    port.connect().close()
    clock.now_s += strangers.OPEN_SECONDS
    watched.sweep()
    with pytest.raises(TimeoutError):
        port.connect()
    assert watched.note_call(probe.peer, is_known=False)
    assert probe.is_open


def test_calls_without_a_token_on_a_known_connection_are_refused_alone(
    port: Port, clock: Clock
) -> None:
    watched = port.watch(known_calls=10, known_calls_per_second=1)
    proxy = port.connect()
    assert watched.note_call(proxy.peer, is_known=True)
    answered = [watched.note_call(proxy.peer, is_known=False) for _ in range(20)]
    assert answered == [True] * 10 + [False] * 10
    watched.sweep()
    assert watched.note_call(proxy.peer, is_known=True)
    assert proxy.is_open
    clock.now_s += 5
    assert watched.note_call(proxy.peer, is_known=False)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[Strangers], None]:
    """`look(watched)` sweeps until the sockets were listed: now and then they cannot be."""
    usual, listed = AcceptedSockets.read, threading.Event()

    def read(sockets: AcceptedSockets) -> list[Accepted] | None:
        found = usual(sockets)
        if found is not None:
            listed.set()
        return found

    def sweep(watched: Strangers) -> None:
        listed.clear()
        until(lambda: watched.sweep() or listed.is_set())

    monkeypatch.setattr(AcceptedSockets, "read", read)
    return sweep


def test_a_connection_is_known_for_minutes_after_its_calls(
    port: Port, clock: Clock, look: Callable[[Strangers], None]
) -> None:
    """What it received while it was known is not counted later."""
    watched = port.watch(calls=1, num_bytes=10_000, unread_bytes=0, bytes_per_second=0)
    idle, running, again = (port.connect() for _ in range(3))
    for each in (idle, running, again):
        watched.note_call(each.peer, is_known=True)
        each.send(100_000)
    watched.note_end(idle.peer)
    watched.note_end(again.peer)
    look(watched)
    clock.now_s += strangers.KNOWN_SECONDS + 1  # a sum of floats is not exact
    for _ in range(2):
        look(watched)
    watched.note_call(again.peer, is_known=True)
    assert all(each.is_open for each in (idle, running, again))
    for each in (idle, running, again):
        each.send(20_000)
    look(watched)
    assert not idle.is_open
    assert running.is_open
    assert again.is_open


def test_looks_go_on_after_one_that_failed(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched, client = port.watch(resets=0), port.connect()
    usual, failed = AcceptedSockets.read, threading.Event()

    def read(sockets: AcceptedSockets) -> list[Accepted] | None:
        if not client_is_watched.is_set():
            failed.set()
            raise MemoryError
        return usual(sockets)

    client_is_watched = threading.Event()
    monkeypatch.setattr(AcceptedSockets, "read", read)
    watched.start()
    assert failed.wait(30)
    client_is_watched.set()
    watched.note_reset(client.peer)
    until(lambda: not client.is_open)
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_a_port_takes_all_connections_once_it_is_not_watched(port: Port) -> None:
    watched, client = port.watch(address_calls=0), port.connect()
    watched.sweep()
    watched.note_call(client.peer, is_known=False)
    watched.sweep()
    with pytest.raises(TimeoutError):
        port.connect()
    watched.close()
    port.connect()


def test_a_closed_connection_is_forgotten(port: Port, clock: Clock) -> None:
    """Another may have its port then."""
    watched, client = port.watch(calls=0), port.connect()
    watched.note_call(client.peer, is_known=False)
    watched.sweep()
    assert not watched.note_call(client.peer, is_known=True)
    clock.now_s += strangers.CLOSED_SECONDS
    assert watched.note_call(client.peer, is_known=True)


@pytest.mark.parametrize(("seconds_each", "is_trimmed"), [(0.0, True), (1.0, False)])
def test_memory_is_given_back_after_storms_not_probes(
    port: Port, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds_each: float, is_trimmed: bool
) -> None:
    trims: list[bool] = []
    monkeypatch.setattr(heap, "give_back", lambda: trims.append(True))
    watched = port.watch()
    for _ in range(2 * strangers.TRIM_CONNECTIONS):
        probe = port.connect()
        watched.sweep()
        probe.close()
        clock.now_s += seconds_each
    for _ in range(2):
        clock.now_s += 1
        watched.sweep()
    assert bool(trims) == is_trimmed


def test_calls_of_probes_are_forgiven(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that asks every second on one connection may do so for ever."""
    now_s = time.monotonic()
    monkeypatch.setattr(strangers, "time", SimpleNamespace(monotonic=lambda: now_s))
    watched, client = port.watch(), port.connect()
    for _ in range(10 * LIMITS.calls):
        now_s += 1
        watched.sweep()
        assert watched.note_call(client.peer, is_known=False)
    assert client.is_open


def test_bytes_are_bounded_until_there_is_a_token(port: Port) -> None:
    watched = port.watch(num_bytes=10_000, unread_bytes=0, bytes_per_second=0)
    stranger, known, little = port.connect("127.0.0.2"), port.connect(), port.connect()
    little.send(9_000)
    watched.note_call(known.peer, is_known=True)
    known.send(100_000)
    watched.sweep()
    assert little.is_open
    stranger.send(11_000)
    watched.sweep()
    assert [each.is_open for each in (stranger, known, little)] == [False, True, True]


def test_a_new_connection_may_send_the_calls_that_are_not_read_yet(port: Port) -> None:
    """A busy server reset callers who began with several large messages at once."""
    watched = port.watch(num_bytes=10_000, unread_bytes=50_000, bytes_per_second=0)
    caller, stranger, greedy = port.connect(), port.connect("127.0.0.2"), port.connect("127.0.0.3")
    for each in (caller, stranger):
        each.send(40_000)
    watched.sweep()
    assert caller.is_open
    watched.note_call(caller.peer, is_known=True)
    watched.note_call(stranger.peer, is_known=False)
    greedy.send(51_000)
    watched.sweep()
    assert [each.is_open for each in (caller, stranger, greedy)] == [True, False, False]


def test_new_connections_of_all_addresses_share_what_they_may_send_unread(port: Port) -> None:
    """However many addresses a stranger has."""
    watched = port.watch(
        num_bytes=10_000, unread_bytes=50_000, all_unread_bytes=70_000, bytes_per_second=0
    )
    held = [port.connect(f"127.0.0.{number}") for number in range(2, 7)]
    for each in held:
        each.send(40_000)
    watched.sweep()
    assert sum(each.is_open for each in held) == 2


def test_a_connection_is_new_for_a_while(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "NEW_SECONDS", 0)
    watched = port.watch(num_bytes=10_000, unread_bytes=50_000, bytes_per_second=0)
    old = port.connect()
    old.send(11_000)
    watched.sweep()
    assert not old.is_open


def test_bytes_of_all_strangers_of_an_address_are_bounded(port: Port) -> None:
    """But not those of connections that have shown a token meanwhile: a proxy has many."""
    watched = port.watch(address_bytes=30_000, address_bytes_per_second=0)
    for _ in range(10):
        each = port.connect()
        each.send(9_000)
        watched.sweep()
        watched.note_call(each.peer, is_known=True)
        watched.sweep()
        assert each.is_open
    held = [port.connect("127.0.0.2") for _ in range(4)]
    for each in held:
        each.send(9_000)
    watched.sweep()
    assert not any(each.is_open for each in held)


def test_known_connections_stay_known_without_files_left(port: Port) -> None:
    watched = port.watch(num_bytes=10_000, unread_bytes=0, bytes_per_second=0)
    known, stranger = port.connect(), port.connect("127.0.0.2")
    watched.sweep()
    watched.note_call(known.peer, is_known=True)
    for each in (known, stranger):
        each.send(100_000)
    with no_files_left():
        watched.sweep()
        watched.sweep()
    watched.sweep()
    assert [each.is_open for each in (known, stranger)] == [True, False]


def test_known_connections_stay_known_when_sockets_are_not_listed(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = port.watch(num_bytes=10_000, unread_bytes=0, bytes_per_second=0)
    known = port.connect()
    watched.sweep()
    watched.note_call(known.peer, is_known=True)
    known.send(100_000)
    with monkeypatch.context() as patched:
        patched.setattr(AcceptedSockets, "read", lambda sockets: None)
        for _ in range(2):
            watched.sweep()
    watched.sweep()
    assert known.is_open


def test_who_becomes_known_during_a_look_has_no_bytes(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = port.watch(num_bytes=10_000, unread_bytes=0, bytes_per_second=0, address_bytes=10_000)
    client = port.connect()
    client.send(100_000)
    usual = Accepted.received_bytes

    def received_bytes(accepted: Accepted) -> int:
        watched.note_call(client.peer, is_known=True)
        return usual(accepted)

    monkeypatch.setattr(Accepted, "received_bytes", received_bytes)
    watched.sweep()
    watched.sweep()
    assert client.is_open
    port.connect()


def test_the_oldest_of_the_address_with_most_makes_place(port: Port) -> None:
    watched = port.watch(max_connections=3)
    probe = port.connect()
    watched.sweep()
    known = port.connect("127.0.0.2")
    watched.note_call(known.peer, is_known=True)
    held = []
    for _ in range(3):
        held.append(port.connect("127.0.0.2"))
        watched.sweep()
    assert [each.is_open for each in (probe, known, *held)] == [True, True, False, True, True]


def test_connections_of_an_address_wait_until_others_are_known(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(strangers, "time", SimpleNamespace(monotonic=lambda: now_s))
    watched = port.watch(address_connections=2, address_connections_per_second=0)
    held = [port.connect("127.0.0.2") for _ in range(3)]
    watched.sweep()
    with pytest.raises(TimeoutError):
        port.connect("127.0.0.2")
    assert all(each.is_open for each in held)
    for each in held:
        watched.note_call(each.peer, is_known=True)
    now_s += strangers.WAIT_SECONDS
    watched.sweep()
    for _ in range(5):  # as a proxy's
        each = port.connect("127.0.0.2")
        watched.sweep()
        watched.note_call(each.peer, is_known=True)
        assert each.is_open


def test_resets_close_a_known_connection_alone(port: Port) -> None:
    watched = port.watch(resets=5)
    resetting, other = port.connect(), port.connect()
    for each in (resetting, other):
        watched.note_call(each.peer, is_known=True)
    for _ in range(6):
        watched.note_reset(resetting.peer)
    watched.sweep()
    assert not resetting.is_open
    assert other.is_open
    port.connect()


class AnyToken(grpc.aio.ServerInterceptor):
    """Knows every token."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if dict(handler_call_details.invocation_metadata).get("authorization"):
            IS_KNOWN.set(True)
        return await continuation(handler_call_details)


@pytest.mark.parametrize("has_token", [True, False])
def test_a_server_closes_connections_that_show_no_token(has_token: bool) -> None:
    """Calls with a token go on; others' connections are closed at their limit, whatever they
    call: health checks, and methods that do not exist."""
    metadata = [("authorization", "Bearer t")] if has_token else []

    async def call(channel: grpc.aio.Channel) -> str:
        try:
            await channel.unary_unary("/no.Such/Method")(b"", metadata=metadata, timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        raise AssertionError

    async def main() -> list[str]:
        served = RpcServer(
            *("our.Service", "127.0.0.1:0", CertificateFiles(SETTINGS), (AnyToken(),)),
            REQUESTS,
        )
        await served.start(lambda server: None)
        served.set_serving(True)
        try:
            async with grpc.aio.insecure_channel(served.address) as channel:
                await HealthStub(channel).Check(HealthCheckRequest(), timeout=30)
                return [await call(channel) for _ in range(2 * LIMITS.calls)]
        finally:
            await served.close()

    codes = asyncio.run(main())
    assert codes[: LIMITS.calls // 2] == ["UNIMPLEMENTED"] * (LIMITS.calls // 2)
    assert ("UNAVAILABLE" in codes) == (not has_token)


def test_without_a_policy_callers_are_no_strangers() -> None:
    policy: Policy[Any] = Policy(anyone=Principal("", frozenset(), frozenset(), None))
    tokens = TokenInterceptor(
        Authenticator(PolicyFile(None, lambda text: policy, policy)), "test", lambda *refused: None
    )

    async def main() -> int:
        served = RpcServer(
            *("our.Service", "127.0.0.1:0", CertificateFiles(SETTINGS), (tokens,)), REQUESTS
        )
        await served.start(lambda server: None)
        try:
            async with grpc.aio.insecure_channel(served.address) as channel:
                call = channel.stream_unary(REFLECTION)
                for number in range(2 * LIMITS.calls):
                    try:
                        await call(iter(()), timeout=30)
                    except grpc.aio.AioRpcError as error:  # an answer of nothing
                        if error.code() is grpc.StatusCode.UNAVAILABLE:
                            return number
                return 2 * LIMITS.calls
        finally:
            await served.close()

    assert asyncio.run(main()) == 2 * LIMITS.calls


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
