"""A request to /v1/responses, from its body to its answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.errors import set_names
from inference_svc.api.http.generate import IncomingRequest
from inference_svc.api.http.models import label_of
from inference_svc.api.http.request import REQUEST_ID_HEADER, authenticated
from inference_svc.api.http.response import AnswerMemory, FullResponse
from inference_svc.api.http.responses.body import Responses, ResponsesBody, settings
from inference_svc.api.http.responses.items import Items
from inference_svc.api.http.serving.disconnect import cancel_on_disconnect
from inference_svc.api.http.sse import EventStream, to_json
from inference_svc.api.service import Service
from servicekit.shares import Shares


class ResponsesRoute:
    def __init__(self, service: Service, answers: Shares) -> None:
        self._service = service
        self._answers = answers

    async def handle(self, request: Request) -> Response:
        set_names(request, Responses.names)
        endpoint = _Noting()
        incoming: IncomingRequest[ResponsesBody] = IncomingRequest(
            request, endpoint, self._service.facts
        )
        with authenticated(request) as caller:
            stream = await cancel_on_disconnect(
                incoming.receive_after_body, self._service.generate(caller, incoming)
            )
        assert incoming.options is not None, "generate has read them"
        headers = {REQUEST_ID_HEADER: stream.call.request_id}
        items = Items(self._head(stream, endpoint.settings))
        if incoming.options.stream:
            return EventStream(_events(stream, items), Responses.names, headers)
        memory = AnswerMemory(self._answers, stream.principal.account)
        try:
            whole = await cancel_on_disconnect(request.receive, _whole(stream, items, memory))
        except BaseException:
            memory.release()
            raise
        return FullResponse([whole], headers, memory)

    def _head(self, stream: GenerateStream, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"resp_{stream.call.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": label_of(stream.binding, stream.principal, self._service.facts),
            **settings,
        }


class _Noting(Responses):
    """Keeps the fields of a body that the answer repeats."""

    settings: Mapping[str, Any] = {}

    def prompts(self, body: ResponsesBody) -> Any:
        self.settings = settings(body)
        return super().prompts(body)


async def _events(stream: GenerateStream, items: Items) -> AsyncGenerator[bytes, None]:
    for event in items.begin():
        yield event
    async with stream.deltas() as deltas:
        async for _, delta in deltas:
            for event in items.add(delta):
                yield event
            if delta.finish_reason is not None:
                for event in items.end(delta.finish_reason, delta.usage):
                    yield event


async def _whole(stream: GenerateStream, items: Items, memory: AnswerMemory) -> bytes:
    async with stream.deltas() as deltas:
        async for _, delta in deltas:
            memory.add(sum(map(len, items.add(delta))))
            if delta.finish_reason is not None:
                for event in items.end(delta.finish_reason, delta.usage):
                    memory.add(len(event))
    return to_json(items.whole()).encode()
