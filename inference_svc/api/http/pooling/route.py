"""The flow of the routes that pool: read a body, start its requests, answer with all results."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Executor
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from inference_svc.api.generate_call import MAX_ID_CHARS, GenerateCall, checked_parts
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.errors import Names, set_names
from inference_svc.api.http.generate import INACTIVE_HEADER, head_of
from inference_svc.api.http.generation_body import AdapterPartBody, Ignored
from inference_svc.api.http.models import adapter_of
from inference_svc.api.http.request import (
    MAX_VALUES,
    REQUEST_ID_HEADER,
    Body,
    IncomingBody,
    authenticated,
)
from inference_svc.api.http.response import AnswerMemory, FullResponse
from inference_svc.api.http.serving.disconnect import cancel_on_disconnect
from inference_svc.api.pooling.call import MAX_INPUT_TOKENS, MAX_INPUTS
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.service import Service
from inference_svc.core import MAX_PARTS, sum_label
from inference_svc.store.adapter_resolver import Binding
from servicekit.errors import InvalidArgument
from servicekit.shares import Shares

NAMES: Names = {"adapter": "model", "chat": "model"}
DIGEST_HEADER = "x-adapter-digest"
"""Has the adapter's digest, or of a sum each part's and its scale: some answers are lists alone."""


class PoolBody(Body):
    """The fields that all bodies have; null means absent, and without a `model` the base model
    answers."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    user: Ignored | None = None

    # Extensions, by vLLM's names.
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    min_revision: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    adapters: (
        Annotated[list[AdapterPartBody], Field(fail_fast=True), Field(max_length=MAX_PARTS)] | None
    ) = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        """Returns the call. Subclasses define it. Raises InvalidArgument naming the field."""
        raise NotImplementedError

    def common(self, request_id: str, adapter: str) -> dict[str, Any]:
        """Returns the fields of `PoolCall`. Raises InvalidArgument for adapters beside another
        model than the base model."""
        if self.adapters and adapter:
            raise InvalidArgument(
                "model: must be the base model if adapters is set", subject="model"
            )
        return {
            "request_id": request_id,
            "adapter": adapter,
            "parts": checked_parts([(part.ref, part.scale) for part in self.adapters or ()]),
            "min_revision": self.min_revision or 0,
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
            "adapter_field": "model",
            "is_id_unique": False,
        }


B = TypeVar("B", bound=PoolBody)
B_contra = TypeVar("B_contra", bound=PoolBody, contravariant=True)


class Answer(Protocol):
    """Formats the answer to a body, all of which is kept that the answer needs."""

    def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> Coroutine[Any, Any, list[bytes]]:
        """Returns one JSON object in parts, which begins with the `head`. Raises ShareExceeded, and
        like `pooled_inputs`."""
        ...


class Endpoint(Protocol[B_contra]):
    """The differences between the routes."""

    body: ClassVar[Any]
    id_prefix: ClassVar[str]
    object: ClassVar[str]

    def answer(self, body: B_contra, facts: ServerFacts) -> Answer: ...


class IncomingPool(IncomingBody, Generic[B]):
    """A request to pool, and its `answer` once its body is read."""

    def __init__(self, request: Request, endpoint: Endpoint[B], facts: ServerFacts) -> None:
        super().__init__(request)
        self.answer: Answer | None = None
        self._endpoint = endpoint
        self._facts = facts

    async def read(self, parsers: Executor) -> GenerateCall:
        max_values = max(MAX_VALUES, MAX_INPUT_TOKENS + MAX_INPUTS)
        body: B = await self.read_as(self._endpoint.body, parsers, max_values)
        adapter = "" if body.model is None else adapter_of(body.model, self._facts)
        self.adapter = adapter or sum_label(part.ref for part in body.adapters or ())
        call = body.to_call(self.request_id, adapter, self._facts)
        self.answer = self._endpoint.answer(body, self._facts)
        return call


class PoolRoute(Generic[B]):
    def __init__(self, service: Service, endpoint: Endpoint[B], answers: Shares) -> None:
        self._service = service
        self._endpoint = endpoint
        self._answers = answers

    async def handle(self, request: Request) -> Response:
        set_names(request, NAMES)
        incoming = IncomingPool(request, self._endpoint, self._service.facts)
        with authenticated(request) as caller:
            stream = await cancel_on_disconnect(
                incoming.receive_after_body, self._service.generate(caller, incoming)
            )
        assert incoming.answer is not None, "generate has read it"
        headers = {REQUEST_ID_HEADER: stream.call.request_id}
        num_inactive = sum(each.has_inactive_adapter for each in stream.requests)
        if num_inactive:
            headers[INACTIVE_HEADER] = f"{num_inactive} of {len(stream.requests)} inputs"
        if stream.binding is not None:
            headers[DIGEST_HEADER] = _digests(stream.binding)
        memory = AnswerMemory(self._answers, stream.principal.account)
        endpoint = self._endpoint
        head = head_of(stream, self._service.facts, endpoint.object, endpoint.id_prefix)
        try:
            encoding = incoming.answer.encode(stream, head, memory)
            parts = await cancel_on_disconnect(request.receive, encoding)
        except BaseException:
            memory.release()
            raise
        return FullResponse(parts, headers, memory)


def _digests(binding: Binding) -> str:
    parts = [f"{part.digest};scale={scale}" for part, scale in binding.parts]
    return ", ".join(parts) or binding.digest


def to_usage(num_tokens: int, num_cached: int) -> dict[str, Any]:
    """Returns the usage of all inputs together."""
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
