"""/v1/embeddings: its body, and the list of vectors that it answers with."""

from __future__ import annotations

import asyncio
import base64
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.completions import are_ids
from inference_svc.api.http.pooling.route import PoolBody, to_usage
from inference_svc.api.http.response import AnswerMemory
from inference_svc.api.http.sse import to_json
from inference_svc.api.pooling.call import MAX_INPUTS
from inference_svc.api.pooling.embed import (
    MAX_DIMENSIONS,
    MAX_PROMPT_NAME_CHARS,
    EmbedCall,
    Embedded,
    embeddings,
)
from inference_svc.api.server_facts import ServerFacts
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import PoolingOption
from inference_svc.text.prompt import Prompt, Text

Inputs = tuple[str | tuple[int, ...], ...]


def to_inputs(value: object) -> Inputs:
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


def to_prompt(given: str | tuple[int, ...], add_special_tokens: bool | None) -> Prompt:
    return Text(given, add_special_tokens is not False) if isinstance(given, str) else given


class EmbeddingsBody(PoolBody):
    input: Annotated[Inputs, PlainValidator(to_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None

    # Extensions, by the names of vLLM and of sentence-transformers where these have them.
    pooling: Literal["last", "mean", "first"] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Field(max_length=MAX_PROMPT_NAME_CHARS)] | None = None
    add_special_tokens: bool | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        option = PoolingOption(
            None if self.pooling is None else Pooling(self.pooling),
            self.normalize,
            self.dimensions or 0,
        )
        call = EmbedCall(
            **self.common(request_id, adapter),
            inputs=tuple(to_prompt(each, self.add_special_tokens) for each in self.input),
            option=option,
            prompt_name=self.prompt_name or "",
            inputs_field="input",
        )
        return call.to_call(facts.embedding)


@dataclass(frozen=True, slots=True)
class Vectors:
    """See `route.Answer`."""

    is_base64: bool

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        """The vectors are in the order of the inputs."""
        vectors = [b""] * len(stream.requests)
        num_tokens = num_cached = 0
        async with aclosing(embeddings(stream)) as found:
            async for each in found:
                vectors[each.index] = self._vector(each)
                memory.add(len(vectors[each.index]))
                num_tokens += each.usage.prompt_tokens
                num_cached += each.usage.cached_prompt_tokens
                await asyncio.sleep(0)  # the numbers of a vector take a while to write
        usage = to_usage(num_tokens, num_cached)
        parts = [to_json({**head, "usage": usage})[:-1].encode() + b',"data":[']
        for vector in vectors:
            parts += (vector, b",")
        parts[-1] = b"]}"
        return parts

    def _vector(self, found: Embedded) -> bytes:
        vector: Any = found.vector.tolist()
        if self.is_base64:
            vector = base64.b64encode(found.vector.astype("<f4").tobytes()).decode()
        return to_json({"object": "embedding", "index": found.index, "embedding": vector}).encode()


class Embeddings:
    """See `route.Endpoint`."""

    body: ClassVar = EmbeddingsBody
    id_prefix: ClassVar = "embd"
    object: ClassVar = "list"

    def answer(self, body: EmbeddingsBody, facts: ServerFacts) -> Vectors:
        return Vectors(body.encoding_format == "base64")
