"""One tenant, or a stranger, attacks the HTTP front of a real process: what it holds is bounded,
and others are served meanwhile."""

from __future__ import annotations

import json
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from inference_svc.api.http.request import MAX_BODY_BYTES, MAX_VALUES
from tests.support.access.certificates import Authority
from tests.support.models.zoo import SPECS, Zoo, make_zoo
from tests.support.wait import until
from tests.system.attacked_front import (
    ATTACKER,
    COMPLETIONS,
    MIB,
    VICTIM,
    AttackedFront,
    open_files,
    request_head,
    status_of,
)

SMALL = {"model": "base", "prompt": "abc", "max_tokens": 1}
NUM_HALF_SENT, NUM_WAITING, NUM_REFUSED, NUM_PROMPTS = 600, 40, 20, 20
NUM_STRANGERS, NUM_HANDSHAKES = 3000, 300
MAX_STRANGER_MIB = 50
MAX_PARSED_MIB = 64
"""What parsing one body after the other leaves to the allocator."""
MAX_SHARE_MIB = 32 + MAX_PARSED_MIB
"""A tenant's half of --request-memory, and what is parsed of it."""
ANSWER_S = 5.0
"""Far more than it takes, and far less than the attacks took others."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return make_zoo("llama", tmp_path_factory.mktemp("model"), SPECS[:1])


@pytest.fixture
def attacked(model: Zoo, tmp_path: Path) -> Iterator[Callable[..., AttackedFront]]:
    with ExitStack() as stack:

        def start(*flags: str, **options: Any) -> AttackedFront:
            made = stack.enter_context(AttackedFront(model, tmp_path, *flags, **options))
            made.seconds(COMPLETIONS, SMALL)
            return made

        yield start


def large(fields: str) -> bytes:
    """A body of these fields, as large as may be."""
    body = json.dumps(SMALL)[:-1].encode()
    return body + fields.encode() + b" " * (MAX_BODY_BYTES - len(body) - len(fields) - 1) + b"}"


def test_waiting_requests_hold_nothing_of_their_bodies(
    attacked: Callable[..., AttackedFront],
) -> None:
    server = attacked()
    many = ",".join(['{"b":0}'] * (MAX_BODY_BYTES // 8 - 30))
    metadata = f',"metadata":{{"a":[{many}]}}'
    with server.stopped_engine(), ExitStack() as stack:
        before = server.memory_bytes
        waiting = [
            server.post(stack, COMPLETIONS, large(fields), ATTACKER)
            for fields in ["", metadata] * (NUM_WAITING // 2)
        ]
        for connection in waiting[1::2]:
            assert status_of(connection) == 400
        assert server.status("/health") == 200
        grown = (server.memory_bytes - before) / MIB
        print(f"{NUM_WAITING} waiting requests of {MAX_BODY_BYTES} bytes: {grown:.0f} MiB")
        assert grown < MAX_SHARE_MIB


def test_refused_bodies_are_not_kept(attacked: Callable[..., AttackedFront]) -> None:
    """By connections that are kept for further requests."""
    server = attacked()
    ids = ",".join(["3333"] * (MAX_VALUES - 10)).encode()
    unknown = b'{"model":"base","prompt":[' + ids + b'],"x":1'
    unknown += b" " * (MAX_BODY_BYTES - len(unknown) - 1) + b"}"
    with ExitStack() as stack:
        before = server.memory_bytes
        for _ in range(NUM_REFUSED):
            assert status_of(server.post(stack, COMPLETIONS, unknown, ATTACKER)) == 400
        grown = (server.memory_bytes - before) / MIB
        print(f"{NUM_REFUSED} refused bodies of {MAX_BODY_BYTES} bytes: {grown:.0f} MiB")
        assert grown < MAX_PARSED_MIB


def test_long_prompts_of_one_tenant_delay_no_other(attacked: Callable[..., AttackedFront]) -> None:
    server = attacked()
    body = json.dumps({**SMALL, "prompt": "ab c" * (MAX_BODY_BYTES // 4 - 20)}).encode()
    longest = {**SMALL, "prompt": "x" * 2100}  # a thread's work, and too long
    with ExitStack() as stack:
        prompts = [server.post(stack, COMPLETIONS, body, ATTACKER) for _ in range(NUM_PROMPTS)]
        start = time.monotonic()
        assert server.status(COMPLETIONS, longest, VICTIM) == 400
        seconds = time.monotonic() - start
        assert [status_of(connection) for connection in prompts] == [400] * NUM_PROMPTS
    print(f"another tenant's prompt beside {NUM_PROMPTS} of 4 MiB: {seconds:.3f} s")
    assert seconds < ANSWER_S


def test_half_sent_bodies_leave_places_for_others(attacked: Callable[..., AttackedFront]) -> None:
    server = attacked()
    with ExitStack() as stack:
        held = [
            server.post(stack, COMPLETIONS, b'{"model":', ATTACKER, length=1000)
            for _ in range(NUM_HALF_SENT)
        ]
        poll = select.poll()
        for connection in held:
            poll.register(connection, select.POLLIN)
        until(lambda: len(poll.poll(0)) >= NUM_HALF_SENT - 1024 // 2)
        start = time.monotonic()
        assert server.status("/health") == 200
        health_s = time.monotonic() - start
        seconds = server.seconds(COMPLETIONS, SMALL)
        print(f"beside half-sent bodies: /health {health_s:.3f} s, a request {seconds:.3f} s")
        assert health_s < ANSWER_S
        assert seconds < ANSWER_S


@pytest.fixture
def many_files() -> Iterator[int]:
    """A limit that allows this process, too, to hold that many connections."""
    num_files = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    with open_files(num_files):
        yield num_files


def attack(connect: Callable[[], socket.socket], *requests: bytes, count: int) -> int:
    """Returns how many connections there are now that sent one of the requests, in turns."""
    num_connected = 0
    for index in range(count):
        try:
            connect().sendall(requests[index % len(requests)])
        except OSError:
            continue  # closed for another
        num_connected += 1
    return num_connected


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 30_000
HALF_BODY = request_head(COMPLETIONS, MAX_BODY_BYTES) + b"{" * 60_000


def test_strangers_move_little_memory(
    attacked: Callable[..., AttackedFront], many_files: int
) -> None:
    """By headers and bodies without an end, and by answers that nobody reads."""
    server = attacked("--http-open-metrics", num_files=many_files)
    before = server.memory_bytes
    requests = [HEAD, HALF_BODY, HEAD + b"\r\n\r\n", b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"]
    with ExitStack() as stack:
        count = min(NUM_STRANGERS, many_files // 2)
        num_connected = attack(lambda: server.connect(stack), *requests, count=count)
        assert server.status("/health") == 200
        grown = (server.memory_bytes - before) / MIB
        print(f"{num_connected} connections without a token: {grown:.0f} MiB")
        assert grown < MAX_STRANGER_MIB


def test_strangers_move_little_memory_over_tls(
    attacked: Callable[..., AttackedFront], many_files: int, tmp_path: Path
) -> None:
    """By handshakes that do not begin, or do not end, and by headers without an end."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("service")
    server = attacked(
        *("--tls-cert-file", str(cert), "--tls-key-file", str(key)),
        num_files=many_files,
        context=ssl.create_default_context(cafile=authority.path),
    )
    before = server.memory_bytes
    with ExitStack() as stack:
        count = min(NUM_STRANGERS, many_files // 2) - NUM_HANDSHAKES
        hello = b"\x16\x03\x01\x40\x00" + b"\x01" * 10_000
        silent = attack(lambda: server.connect_plain(stack), b"", hello, count=count)
        ended = attack(lambda: server.connect(stack), HEAD, count=NUM_HANDSHAKES)
        assert server.status("/health") == 200
        assert server.seconds(COMPLETIONS, SMALL) < ANSWER_S
        grown = (server.memory_bytes - before) / MIB
        print(f"{silent} handshakes that never end, {ended} that do: {grown:.0f} MiB")
        assert ended == NUM_HANDSHAKES
        assert grown < MAX_STRANGER_MIB
