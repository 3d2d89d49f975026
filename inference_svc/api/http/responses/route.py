"""A request to /v1/responses, from its body to its answer; other routes of items share it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, ClassVar, Protocol

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
from inference_svc.frontend.output_stream import Delta
from servicekit.shares import Shares


class AnswerItems(Protocol):
    """The items of an answer, as events while it comes, and whole at its end."""

    def begin(self) -> Iterator[bytes]: ...
    def add(self, delta: Delta) -> Iterator[bytes]: ...
    def end(self, last: Delta) -> Iterator[bytes]: ...
    def whole(self) -> dict[str, Any]: ...


class AnswerRoute:
    """A route whose answers have items, each a subclass with its `endpoint`. See `authenticated`
    for `takes_api_key`."""

    endpoint: ClassVar[type[Any]]
    takes_api_key: ClassVar[bool] = False

    def __init__(self, service: Service, answers: Shares) -> None:
        self._service = service
        self._answers = answers

    def items(self, stream: GenerateStream, endpoint: Any) -> AnswerItems:
        """Returns the items of an answer; `endpoint` has read its request."""
        raise NotImplementedError

    def error_form(self, status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns an error in the form of the route, made of OpenAI's."""
        return body

    async def handle(self, request: Request) -> Response:
        endpoint = self.endpoint()
        set_names(request, endpoint.names, self.error_form)
        incoming: IncomingRequest[Any] = IncomingRequest(request, endpoint, self._service.facts)
        with authenticated(request, takes_api_key=self.takes_api_key) as caller:
            stream = await cancel_on_disconnect(
                incoming.receive_after_body, self._service.generate(caller, incoming)
            )
        assert incoming.options is not None, "generate has read them"
        headers = {REQUEST_ID_HEADER: stream.call.request_id}
        items = self.items(stream, endpoint)
        if incoming.options.stream:
            return EventStream(_events(stream, items), endpoint.names, headers, self.error_form)
        memory = AnswerMemory(self._answers, stream.principal.account)
        try:
            whole = await cancel_on_disconnect(request.receive, _whole(stream, items, memory))
        except BaseException:
            memory.release()
            raise
        return FullResponse([whole], headers, memory)


class _Noting(Responses):
    """Keeps the fields of a body that the answer repeats."""

    settings: Mapping[str, Any] = {}

    def prompts(self, body: ResponsesBody) -> Any:
        self.settings = settings(body)
        return super().prompts(body)


class ResponsesRoute(AnswerRoute):
    endpoint = _Noting

    def items(self, stream: GenerateStream, endpoint: _Noting) -> Items:
        return Items(
            {
                "id": f"resp_{stream.call.request_id}",
                "object": "response",
                "created_at": int(time.time()),
                "model": label_of(stream.binding, stream.principal, self._service.facts),
                **endpoint.settings,
            }
        )


async def _events(stream: GenerateStream, items: AnswerItems) -> AsyncGenerator[bytes, None]:
    for event in items.begin():
        yield event
    async with stream.deltas() as deltas:
        async for _, delta in deltas:
            for event in items.add(delta):
                yield event
            if delta.finish_reason is not None:
                for event in items.end(delta):
                    yield event


async def _whole(stream: GenerateStream, items: AnswerItems, memory: AnswerMemory) -> bytes:
    async with stream.deltas() as deltas:
        async for _, delta in deltas:
            memory.add(sum(map(len, items.add(delta))))
            if delta.finish_reason is not None:
                for event in items.end(delta):
                    memory.add(len(event))
    return to_json(items.whole()).encode()
