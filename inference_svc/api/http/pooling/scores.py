"""/v1/score and /v1/rerank, by vLLM's names: how relevant documents are for a query. Documents of
/v1/rerank may also have the names of text-embeddings-inference."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.pooling.inputs import CutBody, Direction, kept_of
from inference_svc.api.http.pooling.route import to_usage
from inference_svc.api.http.response import AnswerMemory
from inference_svc.api.http.sse import to_json
from inference_svc.api.pooling.call import MAX_INPUTS
from inference_svc.api.pooling.score import MAX_INSTRUCTION_CHARS, ScoreCall, scores
from inference_svc.api.server_facts import ServerFacts
from inference_svc.results.embedding_rule import DenseActivation
from servicekit.errors import InvalidArgument

_OF_DOCUMENTS: tuple[str, ...] = (
    "top_n",
    "return_documents",
    "use_activation",
    "truncate_prompt_tokens",
    "truncation_side",
)
_OF_TEXTS: tuple[str, ...] = ("return_text", "raw_scores", "truncate", "truncation_direction")
"""The fields of one form of /rerank alone."""
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


class ScoreBody(CutBody):
    """One text with each of the others, or as many texts on both sides, in pairs."""

    text_1: Texts
    text_2: Texts
    use_activation: bool | None = None

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
            **self.cut(request_id, adapter),
            is_raw=self.use_activation is False,
            raw_field="use_activation",
            raw_words="use_activation: false",
            pairs=tuple(zip(queries, documents, strict=True)),
            instruction=self.instruction or "",
            inputs_field="text_2",
            queries_field="text_1",
        )
        return call.to_call(facts, generates=facts.generates)


class RerankBody(CutBody):
    query: Annotated[str, Field(min_length=1)]
    documents: Texts | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None

    # Of text-embeddings-inference, which has `texts` in the place of documents.
    texts: Texts | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None

    # Of our own.
    instruction: Annotated[str, Field(max_length=MAX_INSTRUCTION_CHARS)] | None = None

    @property
    def given(self) -> list[str]:
        return self.documents or self.texts or []

    @property
    def is_raw(self) -> bool:
        return bool(self.raw_scores) if self.texts is not None else self.use_activation is False

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        if (self.documents is None) == (self.texts is None):
            raise InvalidArgument("documents: give these, or texts", subject="documents")
        self._check_fields_of_other()
        fields = self.cut(request_id, adapter)
        if self.texts is not None:
            fields["kept"] = kept_of(self.truncate, self.truncation_direction)
        call = ScoreCall(
            **fields,
            is_raw=self.is_raw,
            raw_field="use_activation" if self.texts is None else "raw_scores",
            raw_words="use_activation: false" if self.texts is None else "raw_scores: true",
            is_configured=self.texts is None,
            pairs=tuple((self.query, document) for document in self.given),
            instruction=self.instruction or "",
            inputs_field="documents" if self.texts is None else "texts",
        )
        return call.to_call(facts, generates=facts.generates)

    def _check_fields_of_other(self) -> None:
        """Raises InvalidArgument for a field that only the other form of this route has."""
        form, other, fields = "texts", "documents", _OF_DOCUMENTS
        if self.texts is None:
            form, other, fields = "documents", "texts", _OF_TEXTS
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


async def _scores(
    stream: GenerateStream, activation: DenseActivation, memory: AnswerMemory
) -> _Found:
    memory.add(RESULT_BYTES * len(stream.requests))
    values = [0.0] * len(stream.requests)
    num_tokens = num_cached = 0
    async with aclosing(scores(stream, activation)) as found:
        async for each in found:
            values[each.index] = each.score
            num_tokens += each.usage.prompt_tokens
            num_cached += each.usage.cached_prompt_tokens
    return _Found(values, to_usage(num_tokens, num_cached))


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of pairs. See `route.Answer`."""

    activation: DenseActivation

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        """The scores are in the order of the pairs."""
        found = await _scores(stream, self.activation, memory)
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(found.values)
        ]
        return [to_json({**head, "data": data, "usage": found.usage}).encode()]


class Score:
    """See `route.Endpoint`."""

    body: ClassVar = ScoreBody
    id_prefix: ClassVar = "score"
    object: ClassVar = "list"

    def answer(self, body: ScoreBody, facts: ServerFacts) -> Scores:
        is_raw = body.use_activation is False
        return Scores(facts.classifier.activation_of_score(is_raw=is_raw))


@dataclass(frozen=True, slots=True)
class Ranking:
    """The most relevant documents first, at most `top_n`; with their texts if there are any. See
    `route.Answer`."""

    top_n: int
    texts: tuple[str, ...]
    activation: DenseActivation

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        memory.add(sum(map(len, self.texts)))
        found = await _scores(stream, self.activation, memory)
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
    activation: DenseActivation

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        memory.add(sum(map(len, self.texts)))
        values = (await _scores(stream, self.activation, memory)).values
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
            # As text-embeddings-inference, whatever the model's config says.
            chosen = DenseActivation.IDENTITY if body.is_raw else DenseActivation.SIGMOID
            return Ranks(tuple(body.texts) if body.return_text else (), chosen)
        activation = facts.classifier.activation_of_score(is_raw=body.is_raw)
        texts = () if body.return_documents is False else tuple(body.given)
        return Ranking(body.top_n or len(body.given), texts, activation)
