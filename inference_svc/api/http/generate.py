"""The routes that generate: from a body to a response, full or as events."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from inference_svc.api.generate_call import GenerateCall, checked_sampling
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.errors import Names, set_names
from inference_svc.api.http.generation_body import AnswerOptions, RequestBody
from inference_svc.api.http.models import adapter_of, label_of
from inference_svc.api.http.request import (
    MAX_VALUES,
    REQUEST_ID_HEADER,
    IncomingBody,
    authenticated,
)
from inference_svc.api.http.response import (
    AnswerMemory,
    ChoiceFormatter,
    FullResponse,
    PromptIds,
    encode_events,
    encode_full,
)
from inference_svc.api.http.results import to_wanted
from inference_svc.api.http.serving.disconnect import cancel_on_disconnect
from inference_svc.api.http.sse import EventStream
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.service import Service
from inference_svc.core import SamplingParams, sum_label
from inference_svc.results.base import Scope
from inference_svc.text.pieces import AnyPieces, IdPieces
from inference_svc.text.prompt import Prompt
from servicekit.shares import Shares

INACTIVE_HEADER = "x-adapter-inactive"
"""How many choices are the base model's, as their prompts lack the adapter's invocation tokens."""

B = TypeVar("B", bound=RequestBody)
B_contra = TypeVar("B_contra", bound=RequestBody, contravariant=True)


class Endpoint(Protocol[B_contra]):
    """The differences between the routes. `names` are its names for the subjects of errors. One
    with no `object` names the request in its answers, and tokens by their ids, and has all ids."""

    body: ClassVar[Any]
    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    names: ClassVar[Names]
    has_prompt_ids_in_choices: ClassVar[bool]

    def prompts(self, body: B_contra) -> tuple[Prompt, ...]: ...
    def sampling(self, body: B_contra, facts: ServerFacts) -> SamplingParams: ...
    def top_logprobs(self, body: B_contra) -> int | None:
        """Returns how many most likely tokens each generated token has; None: no logprobs."""
        ...

    def formatter(self, index: int, pieces: AnyPieces, includes_ids: bool) -> ChoiceFormatter: ...


class IncomingRequest(IncomingBody, Generic[B]):
    """A request to generate, and its `options` once its body is read; see
    `service.IncomingCall`."""

    def __init__(self, request: Request, endpoint: Endpoint[B], facts: ServerFacts) -> None:
        super().__init__(request)
        self.options: AnswerOptions | None = None
        self._endpoint = endpoint
        self._facts = facts

    async def read(self, parsers: Executor) -> GenerateCall:
        max_values = max(MAX_VALUES, 2 * self._facts.max_model_len)
        body: B = await self.read_as(self._endpoint.body, parsers, max_values)
        adapter = adapter_of(body.model or self._facts.base_model, self._facts)
        self.adapter = adapter or sum_label(part.ref for part in body.adapters or ())
        self.options = body.answer
        prompts = self._endpoint.prompts(body)
        sampling = self._endpoint.sampling(body, self._facts)
        fields, path = body.sampling_fields
        wanted = to_wanted(
            body,
            fields,
            self._endpoint.top_logprobs(body),
            self._facts.sampling.logprobs_mode,
            path,
            echo=body.is_echoed,
        )
        sampling = checked_sampling(
            sampling,
            self._facts.vocab_size,
            path,
            is_prompt_enough=body.is_echoed or wanted.has_scope(Scope.PROMPT),
        )
        return body.to_call(self.request_id, adapter, prompts, sampling, wanted)


class GenerateRoute(Generic[B]):
    def __init__(self, service: Service, endpoint: Endpoint[B], answers: Shares) -> None:
        self._service = service
        self._endpoint = endpoint
        self._answers = answers

    async def handle(self, request: Request) -> Response:
        set_names(request, self._endpoint.names)
        incoming = IncomingRequest(request, self._endpoint, self._service.facts)
        with authenticated(request) as caller:
            stream = await cancel_on_disconnect(
                incoming.receive_after_body, self._service.generate(caller, incoming)
            )
        assert incoming.options is not None, "generate has read them"
        options, headers = incoming.options, {REQUEST_ID_HEADER: stream.call.request_id}
        num_inactive = sum(request.has_inactive_adapter for request in stream.requests)
        if num_inactive:
            headers[INACTIVE_HEADER] = f"{num_inactive} of {len(stream.requests)} choices"
        formatters = self._formatters(stream, options)
        prompt_ids = PromptIds.NOWHERE
        if options.includes_prompt_ids:
            in_choices = self._endpoint.has_prompt_ids_in_choices
            prompt_ids = PromptIds.IN_CHOICES if in_choices else PromptIds.IN_HEAD
        if options.stream:
            head = self._head(stream, self._endpoint.chunk_object)
            events = encode_events(stream, formatters, head, options.includes_usage, prompt_ids)
            return EventStream(events, self._endpoint.names, headers)
        head = self._head(stream, self._endpoint.object)
        memory = AnswerMemory(self._answers, stream.principal.account)
        try:
            encoding = encode_full(stream, formatters, head, memory, prompt_ids)
            parts = await cancel_on_disconnect(request.receive, encoding)
        except BaseException:
            memory.release()
            raise
        return FullResponse(parts, headers, memory)

    def _formatters(self, stream: GenerateStream, options: AnswerOptions) -> list[ChoiceFormatter]:
        is_of_ids = not self._endpoint.object
        includes_ids = options.includes_ids
        if includes_ids is None:  # without a tokenizer they are all there is of an answer
            includes_ids = is_of_ids or not self._service.facts.has_tokenizer
        by_id = options.names_tokens_by_id or is_of_ids
        pieces: AnyPieces = IdPieces(stream.text.pieces) if by_id else stream.text.pieces
        return [
            self._endpoint.formatter(index, pieces, includes_ids)
            for index in range(len(stream.requests))
        ]

    def _head(self, stream: GenerateStream, object_type: str) -> dict[str, Any]:
        """Returns the first fields of every object of the response."""
        return head_of(stream, self._service.facts, object_type, self._endpoint.id_prefix)


def head_of(
    stream: GenerateStream, facts: ServerFacts, object_type: str, id_prefix: str
) -> dict[str, Any]:
    """Returns the first fields of an answer's objects; an `object_type` of "" names the request in
    place of these."""
    binding = stream.binding
    parts = binding.parts if binding is not None else ()
    adapters = [
        {"name": part.label, "digest": part.digest, "scale": scale} for part, scale in parts
    ]
    request_id = stream.call.request_id
    identity = {
        "object": object_type,
        "id": f"{id_prefix}-{request_id}",
        "created": int(time.time()),
    }
    return {
        **(identity if object_type else {"request_id": request_id}),
        "model": label_of(binding, stream.principal, facts),
        "system_fingerprint": None if binding is None or parts else binding.digest,
        **({"adapters": adapters} if adapters else {}),
    }
