"""/v1/embeddings: its body, and the list of vectors that it answers with."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.pooling.inputs import InputsBody, collected, listed, rows
from inference_svc.api.http.response import AnswerMemory
from inference_svc.api.pooling.embed import (
    MAX_DIMENSIONS,
    MAX_PROMPT_NAME_CHARS,
    EmbedCall,
    Embedded,
    embeddings,
)
from inference_svc.api.server_facts import ServerFacts
from inference_svc.results.embedding_rule import EmbeddingRule, Pooling
from inference_svc.results.pooling import PoolingOption

BASE64_NUMBERS = 3 << 16
"""Numbers of a piece of base64, which takes a millisecond: three bytes are four letters of it, and
only the last piece may have others."""


class EmbeddingsBody(InputsBody):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None

    # Extensions, by the names of vLLM and of sentence-transformers where these have them.
    pooling: Literal["last", "mean", "first", "none"] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Field(max_length=MAX_PROMPT_NAME_CHARS)] | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        pooling = None if self.pooling is None else Pooling(self.pooling)
        option = PoolingOption(pooling, self.normalize, self.dimensions or 0)
        call = EmbedCall(
            **self.with_inputs(request_id, adapter),
            option=option,
            prompt_name=self.prompt_name or "",
        )
        return call.to_call(facts.embedding)


def encoded(vector: NDArray[np.float32], *, is_base64: bool) -> Iterator[bytes]:
    """Yields the JSON of vectors in pieces: numbers, or the base64 of little-endian float32."""
    if not is_base64:
        yield from rows(vector)
        return
    flat = vector.reshape(-1)
    for first in range(0, flat.size, BASE64_NUMBERS):
        end = first + BASE64_NUMBERS
        text = base64.b64encode(flat[first:end].astype("<f4").tobytes())
        yield b'"' * (first == 0) + text + b'"' * (end >= flat.size)


@dataclass(frozen=True, slots=True)
class Vectors:
    """See `route.Answer`. The result of each input is an object of this type, which has its vectors
    in this field."""

    rule: EmbeddingRule
    is_base64: bool
    object: str = "embedding"
    field: str = "embedding"

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        """The vectors are in the order of the inputs."""
        results = embeddings(stream, self.rule)
        found = await collected(results, len(stream.requests), self._item, memory)
        return listed(head, found)

    def _item(self, found: Embedded) -> Iterator[bytes]:
        names = self.object, found.index, self.field
        yield b'{"object":"%b","index":%d,"%b":' % (names[0].encode(), names[1], names[2].encode())
        yield from encoded(found.vector, is_base64=self.is_base64)
        yield b"}"


class Embeddings:
    """See `route.Endpoint`."""

    body: ClassVar = EmbeddingsBody
    id_prefix: ClassVar = "embd"
    object: ClassVar = "list"

    def answer(self, body: EmbeddingsBody, facts: ServerFacts) -> Vectors:
        return Vectors(facts.embedding, body.encoding_format == "base64")
