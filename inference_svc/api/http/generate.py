"""The routes that generate: from a body to a response, full or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from inference_svc.api.generate_call import GenerateCall, checked_sampling
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.choices import in_slices, to_usage
from inference_svc.api.http.disconnect import cancel_on_disconnect
from inference_svc.api.http.errors import Names, set_names
from inference_svc.api.http.models import adapter_of, label_of
from inference_svc.api.http.request import (
    REQUEST_ID_HEADER,
    GenerationBody,
    authenticated,
    check_request_id,
    read_body,
    request_id_of,
)
from inference_svc.api.http.response import NO_USAGE, Choice, ChoiceFormatter, FullResponse
from inference_svc.api.http.sse import DONE, EventStream, to_event, to_json
from inference_svc.api.service import ServerFacts, Service
from inference_svc.core import SamplingParams
from inference_svc.text.pieces import Pieces
from inference_svc.text.prompt import Prompt

B = TypeVar("B", bound=GenerationBody)
B_contra = TypeVar("B_contra", bound=GenerationBody, contravariant=True)


class Endpoint(Protocol[B_contra]):
    """The differences between the routes. `names` are its names for the subjects of errors."""

    body: ClassVar[Any]
    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    names: ClassVar[Names]

    def prompts(self, body: B_contra) -> tuple[Prompt, ...]: ...
    def sampling(self, body: B_contra, max_model_len: int) -> SamplingParams: ...
    def formatter(self, index: int, body: B_contra, pieces: Pieces) -> ChoiceFormatter: ...


class IncomingRequest(Generic[B]):
    """A request to generate, and its `body` once that is read; see `service.IncomingCall`."""

    def __init__(self, request: Request, endpoint: Endpoint[B], facts: ServerFacts) -> None:
        self.request_id = request_id_of(request)
        self.adapter = ""
        self.body: B | None = None
        self._request = request
        self._endpoint = endpoint
        self._facts = facts
        self._is_read = asyncio.Event()

    async def read(self) -> GenerateCall:
        check_request_id(self._request)
        body: B = await read_body(self._request, self._endpoint.body)
        self.body = body
        self._is_read.set()
        self.adapter = adapter_of(body.model, self._facts)
        body.check_streaming()
        prompts = self._endpoint.prompts(body)
        sampling = self._endpoint.sampling(body, self._facts.max_model_len)
        sampling = checked_sampling(sampling, self._facts.vocab_size)
        return body.to_call(self.request_id, self.adapter, prompts, sampling)

    async def receive_after_body(self) -> Message:
        """Receives what follows the body: the client's disconnect."""
        await self._is_read.wait()
        return await self._request.receive()


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[B]):
    """A request that is ready to run. Every object of its response begins with `head`, except for
    the object's type."""

    body: B
    stream: GenerateStream
    head: dict[str, Any]


class GenerateRoute(Generic[B]):
    def __init__(self, service: Service, pieces: Pieces, endpoint: Endpoint[B]) -> None:
        self._service = service
        self._pieces = pieces
        self._endpoint = endpoint

    async def handle(self, request: Request) -> Response:
        set_names(request, self._endpoint.names)
        incoming = IncomingRequest(request, self._endpoint, self._service.facts)
        with authenticated(request) as caller:
            stream = await cancel_on_disconnect(
                incoming.receive_after_body, self._service.generate(caller, incoming)
            )
        assert incoming.body is not None, "generate has read it"
        prepared = PreparedRequest(incoming.body, stream, self._head(stream))
        headers = {REQUEST_ID_HEADER: incoming.request_id}
        if prepared.body.stream:
            return EventStream(self._events(prepared), self._endpoint.names, headers)
        parts = await cancel_on_disconnect(request.receive, self._full_response(prepared))
        return FullResponse(parts, headers)

    def _head(self, stream: GenerateStream) -> dict[str, Any]:
        binding = stream.binding
        return {
            "id": f"{self._endpoint.id_prefix}-{stream.call.request_id}",
            "created": int(time.time()),
            "model": label_of(binding, stream.principal, self._service.facts),
            "system_fingerprint": None if binding is None else binding.digest,
        }

    async def _full_response(self, prepared: PreparedRequest[B]) -> list[bytes]:
        """Returns JSON in parts."""
        choices = [Choice(formatter) for formatter in self._formatters(prepared)]
        async with aclosing(in_slices(prepared.stream)) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
        num_choices = prepared.stream.call.num_choices
        usage = to_usage([choice.usage for choice in choices], num_choices)
        facts = {**prepared.head, "object": self._endpoint.object, "usage": usage}
        parts = [to_json(facts)[:-1].encode() + b',"choices":[']
        for choice in choices:
            parts += (choice.to_json(), b",")
            await asyncio.sleep(0)
        parts[-1] = b"]}"
        return parts

    async def _events(self, prepared: PreparedRequest[B]) -> AsyncGenerator[bytes, None]:
        head = {**prepared.head, "object": self._endpoint.chunk_object}
        includes_usage = prepared.body.includes_usage
        # Everything around the choice is the same in every event: encoded once.
        before = f'data: {to_json(head)[:-1]},"choices":['
        after = '],"usage":null}\n\n' if includes_usage else "]}\n\n"
        formatters = self._formatters(prepared)
        usages = [NO_USAGE] * len(formatters)
        async with aclosing(in_slices(prepared.stream)) as deltas:
            async for index, delta in deltas:
                usages[index] = delta.usage or usages[index]
                chunk = formatters[index].chunk(delta)
                if chunk is not None:
                    yield f"{before}{to_json(chunk)}{after}".encode()
        if includes_usage:
            usage = to_usage(usages, prepared.stream.call.num_choices)
            yield to_event({**head, "choices": [], "usage": usage})
        yield DONE

    def _formatters(self, prepared: PreparedRequest[B]) -> list[ChoiceFormatter]:
        return [
            self._endpoint.formatter(index, prepared.body, self._pieces)
            for index in range(len(prepared.stream.requests))
        ]
