"""/v1/embeddings: its body, and the list of vectors that it answers with."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from inference_svc.api.embed_call import (
    MAX_DIMENSIONS,
    MAX_INPUT_TOKENS,
    MAX_INPUTS,
    MAX_PROMPT_NAME_CHARS,
    EmbedCall,
    Embedded,
    embeddings,
)
from inference_svc.api.generate_call import MAX_ID_CHARS, GenerateCall, checked_parts
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.completions import are_ids
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
from inference_svc.api.http.sse import to_json
from inference_svc.api.service import ServerFacts, Service
from inference_svc.core import MAX_PARTS, sum_label
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import PoolingOption
from inference_svc.text.prompt import Prompt, Text
from servicekit.errors import InvalidArgument
from servicekit.shares import Shares

NAMES: Names = {"adapter": "model"}

Inputs = tuple[str | tuple[int, ...], ...]


def _to_inputs(value: object) -> Inputs:
    """Accepts a text, token ids, or a list of one of these."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if are_ids(value):
            return (tuple(value),)
        if len(value) > MAX_INPUTS:
            raise ValueError(f"must have at most {MAX_INPUTS} items, not {len(value)}")
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if all(map(are_ids, value)):
            return tuple(map(tuple, value))
    raise ValueError("must be a text, a list of token ids, or a list of one of these")


class EmbeddingsBody(Body):
    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    input: Annotated[Inputs, PlainValidator(_to_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    user: Ignored | None = None

    # Extensions, by the names of vLLM and of sentence-transformers where these have them.
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    min_revision: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    adapters: (
        Annotated[list[AdapterPartBody], Field(fail_fast=True), Field(max_length=MAX_PARTS)] | None
    ) = None
    pooling: Literal["last", "mean", "first"] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Field(max_length=MAX_PROMPT_NAME_CHARS)] | None = None
    add_special_tokens: bool | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        """Raises InvalidArgument, also for adapters beside another model than the base model."""
        if self.adapters and adapter:
            raise InvalidArgument(
                "model: must be the base model if adapters is set", subject="model"
            )
        option = PoolingOption(
            None if self.pooling is None else Pooling(self.pooling),
            self.normalize,
            self.dimensions or 0,
        )
        call = EmbedCall(
            request_id=request_id,
            adapter=adapter,
            inputs=tuple(map(self._to_prompt, self.input)),
            option=option,
            prompt_name=self.prompt_name or "",
            parts=checked_parts([(part.ref, part.scale) for part in self.adapters or ()]),
            min_revision=self.min_revision or 0,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            inputs_field="input",
            adapter_field="model",
            is_id_unique=False,
        )
        return call.to_call(facts.embedding)

    def _to_prompt(self, given: str | tuple[int, ...]) -> Prompt:
        if isinstance(given, str):
            return Text(given, self.add_special_tokens is not False)
        return given


class IncomingEmbeddings(IncomingBody):
    """A request to embed, and whether its answer `is_base64`, once its body is read."""

    def __init__(self, request: Request, facts: ServerFacts) -> None:
        super().__init__(request)
        self.is_base64 = False
        self._facts = facts

    async def read(self, parsers: Executor) -> GenerateCall:
        max_values = max(MAX_VALUES, MAX_INPUT_TOKENS + MAX_INPUTS)
        body = await self.read_as(EmbeddingsBody, parsers, max_values)
        adapter = adapter_of(body.model, self._facts)
        self.adapter = adapter or sum_label(part.ref for part in body.adapters or ())
        self.is_base64 = body.encoding_format == "base64"
        return body.to_call(self.request_id, adapter, self._facts)


class EmbeddingsRoute:
    def __init__(self, service: Service, answers: Shares) -> None:
        self._service = service
        self._answers = answers

    async def handle(self, request: Request) -> Response:
        set_names(request, NAMES)
        incoming = IncomingEmbeddings(request, self._service.facts)
        with authenticated(request) as caller:
            stream = await cancel_on_disconnect(
                incoming.receive_after_body, self._service.generate(caller, incoming)
            )
        headers = {REQUEST_ID_HEADER: stream.call.request_id}
        num_inactive = sum(each.has_inactive_adapter for each in stream.requests)
        if num_inactive:
            headers[INACTIVE_HEADER] = f"{num_inactive} of {len(stream.requests)} inputs"
        memory = AnswerMemory(self._answers, stream.principal.account)
        head = head_of(stream, self._service.facts, "list", "embd")
        try:
            encoding = _encode(stream, head, memory, is_base64=incoming.is_base64)
            parts = await cancel_on_disconnect(request.receive, encoding)
        except BaseException:
            memory.release()
            raise
        return FullResponse(parts, headers, memory)


async def _encode(
    stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory, *, is_base64: bool
) -> list[bytes]:
    """Returns one JSON object in parts, with the vectors in the order of the inputs. Raises
    ShareExceeded, and like `embeddings`."""
    vectors = [b""] * len(stream.requests)
    num_tokens = num_cached = 0
    async with aclosing(embeddings(stream)) as found:
        async for each in found:
            vectors[each.index] = _to_vector(each, is_base64=is_base64)
            memory.add(len(vectors[each.index]))
            num_tokens += each.usage.prompt_tokens
            num_cached += each.usage.cached_prompt_tokens
            await asyncio.sleep(0)  # the numbers of a vector take a while to write
    usage = {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    parts = [to_json({**head, "usage": usage})[:-1].encode() + b',"data":[']
    for vector in vectors:
        parts += (vector, b",")
    parts[-1] = b"]}"
    return parts


def _to_vector(found: Embedded, *, is_base64: bool) -> bytes:
    vector: Any = found.vector.tolist()
    if is_base64:
        vector = base64.b64encode(found.vector.astype("<f4").tobytes()).decode()
    return to_json({"object": "embedding", "index": found.index, "embedding": vector}).encode()
