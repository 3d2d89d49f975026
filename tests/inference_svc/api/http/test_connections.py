"""Connections that send no request, or do not read, are closed, and no others."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from inference_svc.api.http.serving import connections
from tests.support.inference.connections import CHAT, HEALTH, Raw, connected, request_of
from tests.support.inference.front import Front
from tests.support.wait import until_async

LARGE: dict[str, Any] = {
    "model": "base",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "n": 32,
    "max_tokens": 40,
    "logprobs": True,
    "top_logprobs": 20,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.2)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits what the kernel buffers for a client that does not read."""
    monkeypatch.setattr(connections, "SEND_BUFFER_BYTES", 4096)


@pytest.mark.usefixtures("short_timeouts")
def test_connection_without_a_request_is_closed(serve_http) -> None:
    async def body(front: Front) -> None:
        async with connected(front) as idle, connected(front) as trickling:
            trickle = asyncio.create_task(_trickle(trickling))
            assert await idle.ends()
            with pytest.raises(ConnectionError):
                await trickle

    serve_http(body)


async def _trickle(client: Raw) -> None:
    """Sends a header without an end, until the connection has one."""
    await client.send(b"GET /health HTTP/1.1\r\nx: ")
    while True:
        await client.send(b"x")
        await asyncio.sleep(0.02)


@pytest.mark.usefixtures("short_timeouts")
def test_keep_alive_bounds_the_next_header(serve_http, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(front: Front) -> None:
        monkeypatch.setattr(connections, "HEADER_SECONDS", 60.0)  # a busy machine sends it late
        async with connected(front) as client:
            await client.send(HEALTH)
            assert b" 200 " in await client.read()
            monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
            assert not await client.ends(within_s=0.4), "it may send another request"
            await client.send(HEALTH)
            assert b" 200 " in await client.read()
            with pytest.raises(ConnectionError):
                await _trickle(client)
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
        front.engine.hold.set()
        waiting = asyncio.create_task(front.complete())
        await asyncio.sleep(2 * connections.HEADER_SECONDS)
        front.engine.hold.clear()
        assert (await waiting).choices[0].text == "abc", "a request may take longer than its header"

    serve_http(body)


@pytest.mark.usefixtures("short_timeouts", "small_buffers")
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_stops_reading_loses_its_requests(serve_http, stream: bool) -> None:
    async def body(front: Front) -> None:
        async with connected(front, receive_bytes=4096) as client:
            front.engine.step_s = 0.05 if stream else 0.0
            await client.post(CHAT, LARGE | {"stream": stream})
            await until_async(lambda: len(front.engine.submitted) == LARGE["n"])
            if stream:
                counts = front.engine._running
                await until_async(lambda: min(count for _, count in counts.values()) >= 5)
                front.engine.hold.set()  # nothing but the write timeout ends it
            await until_async(lambda: front.engine.num_running == 0)
            line = f'http_requests_total{{route="{CHAT}",status="{499 if stream else 200}"}} 1.0'
            await front.until_metric(line)
        assert len(front.engine.cancelled) == (LARGE["n"] if stream else 0)

    serve_http(body)


@pytest.mark.usefixtures("small_buffers")
def test_reader_that_is_too_slow_loses_its_answer(
    serve_http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads again and again, but less than it must."""
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(connections, "MIN_WRITE_BYTES_PER_S", 1 << 30)

    async def body(front: Front) -> None:
        async with connected(front, receive_bytes=32 << 10) as client:
            await client.post(CHAT, LARGE | {"stream": False})
            data = bytearray()
            while part := await client.read(32 << 10):
                data += part
                await asyncio.sleep(0.05)
        head, _, rest = data.partition(b"\r\n\r\n")
        (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
        assert 0 < len(rest) < int(length.split()[1])

    serve_http(body)


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
def test_unread_answers_of_one_tenant_leave_memory_to_others(
    serve_http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_svc.api.http.response.RESERVED_BYTES", 6 << 20)
    fields = LARGE | {"stream": False}

    async def body(front: Front) -> None:
        async with connected(front, receive_bytes=4096) as client:
            await client.post(CHAT, fields)
            await client.read(1)
            refused = await front.post(CHAT, fields)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "rate_limit_exceeded",
            )
            assert "answer_bytes" in refused.json()["error"]["message"]
            assert "--answer-memory" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
            await until_async(lambda: front.engine.num_running == 0)

        async def is_free() -> bool:
            return (await front.post(CHAT, fields)).status_code == 200

        await until_async(is_free)

    serve_http(body, answer_memory=8 << 20)


def only_connection(front: Front) -> Any:
    """The server's end of the only connection."""
    (found,) = front.connections.all_open
    return found


@pytest.mark.slow
def test_pipelined_requests_are_answered_one_after_the_other(serve_http) -> None:
    """While one is answered, not much more than one read of the others lies here."""
    num_pipelined = 1000
    first = json.dumps({"model": "base", "prompt": "abc", "max_tokens": 1}).encode()

    async def body(front: Front) -> None:
        front.engine.hold.set()
        async with connected(front) as client:
            requests = request_of(first, "/v1/completions") + HEALTH * num_pipelined
            sending = asyncio.create_task(client.send(requests))
            await until_async(lambda: front.engine.num_running == 1)
            connection = only_connection(front)
            await until_async(lambda: not connection.transport.is_reading())
            assert 0 < len(connection.conn.trailing_data[0]) <= 16 << 10
            front.engine.hold.clear()
            data = bytearray()
            while data.count(b"HTTP/1.1 200 ") <= num_pipelined:
                data += await client.read()
            await sending
            assert data.startswith(b"HTTP/1.1 200 ")
            assert b'"text_completion"' in data.split(b"HTTP/1.1 200 ")[1]
            assert data.count(b"HTTP/1.1 ") == 1 + num_pipelined
            await client.send(HEALTH)
            assert b" 200 " in await client.read(), "it goes on"

    serve_http(body)


def test_body_is_read_once_it_has_a_place(serve_http) -> None:
    whole = 4 << 20

    async def body(front: Front) -> None:
        async with connected(front) as first:
            await first.send(request_of(b"{", length=whole))
            await until_async(lambda: front.connections.busy.used == 1)
            await until_async(lambda: only_connection(front).reads_body)
            async with connected(front) as second:
                sending = asyncio.create_task(second.send(request_of(b" " * whole)))

                def held() -> list[int]:
                    """The bytes of the second, once no more of it is read."""
                    each = front.connections.all_open
                    return [len(it.cycle.body) for it in each if it.flow.read_paused]

                await until_async(lambda: len(held()) == 1)
                assert 0 < held()[0] <= 16 << 10
                sending.cancel()

    serve_http(body, request_memory=whole)


def test_connection_keeps_nothing_of_a_request_that_is_answered(serve_http) -> None:
    async def body(front: Front) -> None:
        async with connected(front) as client:
            await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 8000 + b"\r\n\r\n")
            assert b" 200 " in await client.read()
            connection = only_connection(front)
            assert (connection.scope, connection.headers) == (None, None)
            assert (connection.cycle.scope, connection.cycle.body) == ({}, b"")
            assert connection.stranger_bytes == 0

    serve_http(body)


def test_body_that_nobody_reads_ends_the_connection(serve_http) -> None:
    """It would be read, and thrown away, for as long as it comes."""

    async def body(front: Front) -> None:
        async with connected(front) as client:
            await client.send(
                b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
            )
            assert b" 200 " in await client.read()
            assert await client.ends()

    serve_http(body)


@pytest.mark.usefixtures("small_buffers")
def test_slow_reader_gets_larger_chunks(serve_http) -> None:
    async def body(front: Front) -> None:
        async with connected(front, receive_bytes=4096) as client:
            await client.post(CHAT, LARGE)
            await until_async(lambda: len(front.engine.submitted) == LARGE["n"])
            await until_async(lambda: front.engine.num_running == 0)
            data = bytearray()
            while part := await client.read():
                data += part
        text = b"".join(line for line in data.split(b"\r\n") if line.startswith(b"data: "))
        events = [event for event in text.decode().split("data: ") if event]
        assert events.pop().strip() == "[DONE]"
        chunks = [json.loads(event)["choices"][0] for event in events]
        num_tokens = LARGE["n"] * LARGE["max_tokens"]
        assert sum(len(each["token_ids"]) for each in chunks) == num_tokens
        assert sum(len(each["logprobs"]["content"]) for each in chunks) == num_tokens
        assert len([each for each in chunks if each["finish_reason"]]) == LARGE["n"]
        # The sockets take little; the rest of each choice arrives in one delta.
        assert len(chunks) < num_tokens / 4

    serve_http(body)


def test_longest_stranger_is_closed_for_a_new_one(
    serve_http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)

    async def body(front: Front) -> None:
        async with connected(front) as first, connected(front) as second, connected(front):
            await first.send(b"GET /hea")
            await front.running.health_of()
            async with connected(front) as newcomer:
                await newcomer.send(HEALTH)
                assert b" 200 " in await newcomer.read()
                assert await first.ends()
                assert not await second.ends(within_s=0.05)

    serve_http(body)


def test_callers_leave_places_for_probes(serve_http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)

    async def body(front: Front) -> None:
        front.engine.hold.set()
        running = [asyncio.create_task(front.complete()) for _ in range(6)]
        await until_async(lambda: front.engine.num_running == 6)
        async with connected(front) as half_sent:
            await half_sent.send(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{".encode()
            )
            assert b" 429 " in await half_sent.read()
        async with connected(front) as probe:
            await probe.send(HEALTH)
            assert b" 200 " in await probe.read()
        front.engine.hold.clear()
        assert [(await each).choices[0].text for each in running] == ["abc"] * 6
        assert (await front.complete()).choices[0].text == "abc", "a place is free again"

    serve_http(body)


def test_longest_idle_connection_is_closed_when_all_are_taken(
    serve_http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    models = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"

    async def body(front: Front) -> None:
        async with AsyncExitStack() as stack:
            idle = []
            for _ in range(4):
                idle.append(await stack.enter_async_context(connected(front)))
                await idle[-1].send(models)
                assert b" 200 " in await idle[-1].read()
            late = await stack.enter_async_context(connected(front))
            await late.send(HEALTH)
            assert b" 200 " in await late.read()
            assert await idle[0].ends()
            assert not await idle[1].ends(within_s=0.05)

    serve_http(body)


class Peer:
    """A connection as its limit knows it."""

    def __init__(self, peer: str, closed: list[Any], tls_bytes: int = 0) -> None:
        self.peer, self.account = peer, ""
        self.stranger_bytes, self.tls_bytes = 0, tls_bytes
        self.abort = lambda: closed.append(self)


def opened(limit: Any, *peers: Peer) -> None:
    for each in peers:
        assert limit.open(each)


def test_peer_with_the_most_strangers_makes_place() -> None:
    closed: list[Any] = []
    limit: Any = connections.ConnectionLimit(4)
    many = [Peer("many", closed) for _ in range(3)]
    opened(limit, Peer("one", closed), *many)
    limit.set_stranger(many[0])
    opened(limit, Peer("new", closed))
    assert closed == [many[1]]


def test_account_with_the_most_idle_connections_makes_place() -> None:
    closed: list[Any] = []
    limit: Any = connections.ConnectionLimit(4)
    each = [Peer("proxy", closed) for _ in range(4)]
    opened(limit, *each)
    for connection, account in zip(each, ("one", "many", "many", "many"), strict=True):
        limit.set_busy(connection, account).release()
        limit.set_idle(connection, account)
    opened(limit, Peer("new", closed))
    assert closed == [each[1]]
    limit.begin_request(each[2])
    assert (limit.num_strangers, len(limit._idle["many"])) == (2, 1)


def test_bytes_of_strangers_are_bounded() -> None:
    """Who sends too much is closed, not who has waited longest."""
    closed: list[Any] = []
    limit: Any = connections.ConnectionLimit(4096)
    victims = [Peer("proxy", closed) for _ in range(5)]
    known, small, large = (Peer("attacker", closed) for _ in range(3))
    opened(limit, *victims, known, small, large)
    for each in victims:
        limit.hold(each, 1000)
    place = limit.set_busy(known, "tenant")
    limit.hold(known, 2 * connections.MAX_STRANGER_BYTES)
    limit.hold(small, 1000)
    limit.hold(large, connections.MAX_STRANGER_BYTES - 6000)
    assert closed == []
    limit.hold(large, connections.MAX_STRANGER_BYTES - 5999)
    assert closed == [large]
    limit.hold(small, connections.MAX_STRANGER_BYTES - 5000)
    assert closed == [large], "what the other held is free again"
    limit.set_stranger(small)
    limit.hold(victims[0], connections.MAX_STRANGER_BYTES - 4000)
    assert closed == [large], "its response is complete: it holds nothing"
    place.release()


def test_handshakes_count_as_bytes_of_strangers() -> None:
    closed: list[Any] = []
    limit: Any = connections.ConnectionLimit(4096)
    num_fitting = connections.MAX_STRANGER_BYTES // connections.TLS_BYTES
    victim = Peer("victim", closed, connections.TLS_BYTES)
    silent = [Peer("attacker", closed, connections.TLS_BYTES) for _ in range(num_fitting + 10)]
    opened(limit, victim, *silent)
    assert closed == silent[: len(closed)]
    assert 10 <= len(closed) <= 12


def test_places_to_linger_are_shared_by_peers() -> None:
    limit: Any = connections.ConnectionLimit(4)
    attacker, victim = Peer("attacker", []), Peer("victim", [])
    held = [limit.linger(attacker, False) for _ in range(connections.MAX_LINGERING)]
    places = [place for place in held if place is not None]
    assert len(places) == connections.MAX_LINGERING * connections.PEER_SHARE
    assert limit.linger(victim, False) is not None
    assert limit.linger(attacker, True) is not None, "known callers have their own"
    for place in places[:2]:
        place.release()
    assert limit.linger(attacker, False) is not None


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8::1:2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_peers(host: str, peer: str) -> None:
    assert connections.peer_of((host, 1)) == peer


def test_half_of_the_files_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((1024, 512), (1, 1), (1 << 20, 4096), (-1, 4096)):
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=limit: (limit, limit))
        assert connections.max_connections() == expected
