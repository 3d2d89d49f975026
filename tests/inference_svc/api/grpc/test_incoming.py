"""A Generate's message becomes a call where it holds up nobody."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.grpc import convert
from inference_svc.api.grpc.servicer import _IncomingCall
from inference_svc.api.server_facts import ServerFacts
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.rpc.requests import INLINE_ENTRIES

FACTS = ServerFacts(
    "base", "FakeForCausalLM", "float32", "float32", "cpu", 10, 64, 4, 16, 8, 64, 16
)


@pytest.mark.parametrize("num_ids", [INLINE_ENTRIES, INLINE_ENTRIES + 1])
def test_many_entries_are_converted_by_a_parser(
    num_ids: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    real = convert.from_generate_request

    def watched(*args: Any) -> GenerateCall:
        threads.append(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr(convert, "from_generate_request", watched)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * num_ids))
    context: Any = SimpleNamespace(time_remaining=lambda: None)

    async def main() -> GenerateCall:
        with ThreadPoolExecutor(1, thread_name_prefix="parser") as parsers:
            return await _IncomingCall(request, context, FACTS).read(parsers)

    assert asyncio.run(main()).prompts == ((1,) * num_ids,)
    assert threads[0].startswith("parser") == (num_ids > INLINE_ENTRIES)
