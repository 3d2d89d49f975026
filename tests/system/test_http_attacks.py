"""One tenant, or a stranger, attacks the HTTP front of a real process: what it holds is bounded,
and others are served meanwhile."""

from __future__ import annotations

import json
import resource
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from inference_svc.api.http.request import MAX_BODY_BYTES
from tests.support.wait import until
from tests.system.attacked_front import (
    ATTACKER,
    COMPLETIONS,
    MIB,
    VICTIM,
    Attacked,
    request_head,
    status_of,
)
from tests.system.zoo import SPECS, Zoo, make_zoo

SMALL = {"model": "base", "prompt": "abc", "max_tokens": 1}
NUM_HALF_SENT, NUM_WAITING, NUM_PROMPTS = 600, 60, 20
MAX_STRANGER_MIB, MAX_SHARE_MIB = 50, 300
ANSWER_S = 5.0
"""Far more than it takes, and far less than the attacks took others."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return make_zoo("llama", tmp_path_factory.mktemp("model"), SPECS[:1])


@pytest.fixture
def attacked(model: Zoo, tmp_path: Path) -> Iterator[Callable[..., Attacked]]:
    with ExitStack() as stack:

        def start(*flags: str, num_files: int = 1024) -> Attacked:
            made = stack.enter_context(Attacked(model, tmp_path, *flags, num_files=num_files))
            made.seconds(COMPLETIONS, SMALL)
            return made

        yield start


def large(fields: str) -> bytes:
    """A body of these fields, as large as may be."""
    body = json.dumps(SMALL)[:-1].encode()
    return body + fields.encode() + b" " * (MAX_BODY_BYTES - len(body) - len(fields) - 1) + b"}"


def test_waiting_requests_hold_nothing_of_their_bodies(attacked: Callable[..., Attacked]) -> None:
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


def test_long_prompts_of_one_tenant_delay_no_other(attacked: Callable[..., Attacked]) -> None:
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


def test_half_sent_bodies_leave_places_for_others(attacked: Callable[..., Attacked]) -> None:
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


def test_strangers_move_little_memory(attacked: Callable[..., Attacked]) -> None:
    num_files = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    server = attacked(num_files=num_files)
    before = server.memory_bytes
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 30_000
    body = request_head(COMPLETIONS, MAX_BODY_BYTES) + b"{" * 60_000
    with ExitStack() as stack:
        for index in range(min(3000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)):
            try:
                server.connect(stack).sendall(body if index % 2 else head)
            except ConnectionError:
                continue  # closed for another
        assert server.status("/health") == 200
        grown = (server.memory_bytes - before) / MIB
        print(f"3,000 connections without a token: {grown:.0f} MiB")
        assert grown < MAX_STRANGER_MIB
