"""/v1/score and /v1/rerank, by vLLM's names: how relevant documents are for a query. Documents of
/v1/rerank may also have the names of text-embeddings-inference."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.pooling.route import PoolBody, to_usage
from inference_svc.api.http.response import AnswerMemory
from inference_svc.api.http.sse import to_json
from inference_svc.api.pooling.call import MAX_INPUTS
from inference_svc.api.pooling.score import MAX_INSTRUCTION_CHARS, ScoreCall, scores
from inference_svc.api.server_facts import ServerFacts
from servicekit.errors import InvalidArgument

RESULT_BYTES = 128
"""The approximate length of a result, besides its document."""


def _to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    list[str],
    Field(fail_fast=True),
    Field(min_length=1, max_length=MAX_INPUTS),
    BeforeValidator(_to_list),
]


class ScoreBody(PoolBody):
    """One text with each of the others, or as many texts on both sides, in pairs."""

    text_1: Texts
    text_2: Texts

    # Of our own.
    instruction: Annotated[str, Field(max_length=MAX_INSTRUCTION_CHARS)] | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        queries, documents = self.text_1, self.text_2
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise InvalidArgument(
                f"text_2: has {len(documents)} texts; text_1 must have as many, or one, not "
                f"{len(queries)}",
                subject="text_2",
            )
        call = ScoreCall(
            **self.common(request_id, adapter),
            pairs=tuple(zip(queries, documents, strict=True)),
            instruction=self.instruction or "",
            inputs_field="text_2",
            queries_field="text_1",
        )
        return call.to_call()


class RerankBody(PoolBody):
    query: Annotated[str, Field(min_length=1)]
    documents: Texts | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    # Of text-embeddings-inference, which has `texts` in the place of documents.
    texts: Texts | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None

    # Of our own.
    instruction: Annotated[str, Field(max_length=MAX_INSTRUCTION_CHARS)] | None = None

    @property
    def given(self) -> list[str]:
        return self.documents or self.texts or []

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        if (self.documents is None) == (self.texts is None):
            raise InvalidArgument("documents: give these, or texts", subject="documents")
        self._check_fields_of_other()
        for field, value in (("raw_scores", self.raw_scores), ("truncate", self.truncate)):
            if value:
                raise InvalidArgument(
                    f"{field}: must be false: scores are probabilities, of whole documents",
                    subject=field,
                )
        call = ScoreCall(
            **self.common(request_id, adapter),
            pairs=tuple((self.query, document) for document in self.given),
            instruction=self.instruction or "",
            inputs_field="documents" if self.texts is None else "texts",
        )
        return call.to_call()

    def _check_fields_of_other(self) -> None:
        """Raises InvalidArgument for a field that only the other form of this route has."""
        form, other, fields = "texts", "documents", ["top_n", "return_documents"]
        if self.texts is None:
            form, other, fields = "documents", "texts", ["return_text"]
        for field in fields:
            if getattr(self, field) is not None:
                raise InvalidArgument(
                    f"{field}: only with {other}: leave it out, or give these in place of {form}",
                    subject=field,
                )


@dataclass(slots=True)
class _Found:
    """The scores in the order of the pairs, and the usage of all."""

    values: list[float]
    usage: dict[str, Any]


async def _scores(stream: GenerateStream, memory: AnswerMemory) -> _Found:
    memory.add(RESULT_BYTES * len(stream.requests))
    values = [0.0] * len(stream.requests)
    num_tokens = num_cached = 0
    async with aclosing(scores(stream)) as found:
        async for each in found:
            values[each.index] = each.score
            num_tokens += each.usage.prompt_tokens
            num_cached += each.usage.cached_prompt_tokens
    return _Found(values, to_usage(num_tokens, num_cached))


class Scores:
    """See `route.Endpoint` and `route.Answer`."""

    body: ClassVar = ScoreBody
    id_prefix: ClassVar = "score"
    object: ClassVar = "list"

    def answer(self, body: ScoreBody, facts: ServerFacts) -> Scores:
        return self

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        """The scores are in the order of the pairs."""
        found = await _scores(stream, memory)
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(found.values)
        ]
        return [to_json({**head, "data": data, "usage": found.usage}).encode()]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The most relevant documents first, at most `top_n`; with their texts if there are any. See
    `route.Answer`."""

    top_n: int
    texts: tuple[str, ...]

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        memory.add(sum(map(len, self.texts)))
        found = await _scores(stream, memory)
        order = sorted(range(len(found.values)), key=lambda index: -found.values[index])
        results = [
            {
                "index": index,
                **({"document": {"text": self.texts[index]}} if self.texts else {}),
                "relevance_score": found.values[index],
            }
            for index in order[: self.top_n]
        ]
        return [to_json({**head, "results": results, "usage": found.usage}).encode()]


@dataclass(frozen=True, slots=True)
class Ranks:
    """See `route.Answer`: the list of text-embeddings-inference, the most relevant texts first."""

    texts: tuple[str, ...]

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        memory.add(sum(map(len, self.texts)))
        values = (await _scores(stream, memory)).values
        order = sorted(range(len(values)), key=lambda index: -values[index])
        ranks = [
            {
                "index": index,
                **({"text": self.texts[index]} if self.texts else {}),
                "score": values[index],
            }
            for index in order
        ]
        return [to_json(ranks).encode()]


class Rerank:
    """See `route.Endpoint`."""

    body: ClassVar = RerankBody
    id_prefix: ClassVar = "rerank"
    object: ClassVar = "list"

    def answer(self, body: RerankBody, facts: ServerFacts) -> Ranking | Ranks:
        if body.texts is not None:
            return Ranks(tuple(body.texts) if body.return_text else ())
        texts = () if body.return_documents is False else tuple(body.given)
        return Ranking(body.top_n or len(body.given), texts)
