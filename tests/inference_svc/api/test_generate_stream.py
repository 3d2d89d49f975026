"""The requests of one call, merged: results that their reader does not have yet count as unread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import pytest

from inference_svc import server
from inference_svc.api.access import Caller
from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.service import Service
from inference_svc.core import Principal, SamplingParams
from inference_svc.frontend.async_engine import AsyncEngine
from inference_svc.frontend.output_stream import UNREAD_BYTES
from servicekit.shares import Shares
from tests.support.inference.serving import Running
from tests.support.wait import until_async


class Incoming:
    """A call of four requests, each of which has one token."""

    request_id, adapter, num_read = "r", "", 0

    def accept(self, caller: Principal) -> int:
        return 0

    async def read(self, parsers: Executor) -> GenerateCall:
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        return GenerateCall("r", "", ((5,),), sampling, num_choices=4, max_running=2)


def test_requests_that_have_ended_count_until_their_reader_asks_for_more(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of one input may be 128 MiB; here each request has its least. Others start
    nevertheless."""
    services: list[Service] = []
    unread = Shares("unread_bytes", 64 * UNREAD_BYTES)

    def kept(**parts: Any) -> Service:
        services.append(Service(**parts))
        return services[-1]

    monkeypatch.setattr(server, "Service", kept)
    monkeypatch.setattr(
        server, "AsyncEngine", lambda engine, text, _: AsyncEngine(engine, text, unread)
    )

    async def body(running: Running) -> None:
        stream = await services[0].generate(Caller({}, ""), Incoming())
        async with stream.deltas() as deltas:
            for num_read in range(4):
                _, delta = await anext(deltas)
                assert delta.finish_reason is not None
                held_bytes = (4 - num_read) * UNREAD_BYTES
                await until_async(lambda: unread.used == held_bytes)  # noqa: B023
                assert len(running.engine.submitted) == 4
            assert [each async for each in deltas] == []
        assert unread.used == 0

    serve(body)
