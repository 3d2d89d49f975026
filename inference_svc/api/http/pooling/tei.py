"""/embed, /embed_all, /predict, /similarity and /info, as text-embeddings-inference has them. The
fields of `PoolBody` are extensions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainValidator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.pooling.inputs import (
    Direction,
    Inputs,
    collected,
    kept_of,
    rows,
    to_inputs,
    to_prompt,
)
from inference_svc.api.http.pooling.route import PoolBody
from inference_svc.api.http.pooling.scores import Texts
from inference_svc.api.http.request import Body, admit, authenticated
from inference_svc.api.http.response import AnswerMemory
from inference_svc.api.http.sse import to_json
from inference_svc.api.pooling.call import MAX_INPUTS
from inference_svc.api.pooling.classify import Classified, ClassifyCall, classes
from inference_svc.api.pooling.embed import (
    MAX_DIMENSIONS,
    MAX_PROMPT_NAME_CHARS,
    EmbedCall,
    Embedded,
    embeddings,
)
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.service import Service
from inference_svc.core import Action
from inference_svc.results.classifier_rule import ClassifierRule
from inference_svc.results.embedding_rule import EmbeddingRule, Pooling
from inference_svc.results.pooling import PoolingOption
from inference_svc.text.pair import Pair
from inference_svc.text.prompt import Prompt

POOLINGS = {Pooling.FIRST: "cls", Pooling.MEAN: "mean", Pooling.LAST: "last_token"}
"""The words of /info."""

PromptName = Annotated[str, Field(max_length=MAX_PROMPT_NAME_CHARS)]


class TeiBody(PoolBody):
    """The fields that all bodies have; null means absent."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None

    def cut(self, request_id: str, adapter: str) -> dict[str, Any]:
        """Returns the fields of `PoolCall`."""
        kept = kept_of(self.truncate, self.truncation_direction)
        return {**self.common(request_id, adapter), "kept": kept}


class SimilarityParameters(Body):
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: PromptName | None = None


class EmbedBody(TeiBody):
    inputs: Annotated[Inputs, PlainValidator(to_inputs)]
    normalize: bool | None = None
    prompt_name: PromptName | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        option = PoolingOption(None, self.normalize is not False, self.dimensions or 0)
        call = EmbedCall(
            **self.cut(request_id, adapter),
            inputs=tuple(to_prompt(each, None) for each in self.inputs),
            option=option,
            prompt_name=self.prompt_name or "",
        )
        return call.to_call(facts.embedding)


class EmbedAllBody(TeiBody):
    inputs: Annotated[Inputs, PlainValidator(to_inputs)]
    prompt_name: PromptName | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        call = EmbedCall(
            **self.cut(request_id, adapter),
            inputs=tuple(to_prompt(each, None) for each in self.inputs),
            option=PoolingOption(Pooling.NONE, is_normalised=False),
            prompt_name=self.prompt_name or "",
        )
        return call.to_call(facts.embedding)


def _vectors(found: Embedded) -> Iterator[bytes]:
    yield from rows(found.vector)


@dataclass(frozen=True, slots=True)
class Vectors:
    """See `route.Answer`: a list of vectors, or of each input's tokens' vectors."""

    rule: EmbeddingRule

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        results = embeddings(stream, self.rule)
        return (await collected(results, len(stream.requests), _vectors, memory)).joined()


class Embed:
    """See `route.Endpoint`."""

    body: ClassVar = EmbedBody
    id_prefix: ClassVar = "embd"
    object: ClassVar = "list"

    def answer(self, body: EmbedBody, facts: ServerFacts) -> Vectors:
        return Vectors(facts.embedding)


class EmbedAll:
    """See `route.Endpoint`."""

    body: ClassVar = EmbedAllBody
    id_prefix: ClassVar = "embd"
    object: ClassVar = "list"

    def answer(self, body: EmbedAllBody, facts: ServerFacts) -> Vectors:
        return Vectors(facts.embedding)


Given = tuple[str, ...]
"""A text, or two that are read as a pair."""
_EXPECTED = 'must be a text, a pair of texts, or a list such as [["a text"], ["one", "of a pair"]]'


def _to_given(value: object) -> tuple[tuple[Given, ...], bool]:
    """Accepts a text, a list with one or two texts, or a list of such lists; returns the texts, and
    whether they are a list."""
    if isinstance(value, str):
        return ((value,),), False
    if not isinstance(value, list) or not value:
        raise ValueError(_EXPECTED)
    if len(value) > MAX_INPUTS:
        raise ValueError(f"must have at most {MAX_INPUTS} items, not {len(value)}")
    lists = value if isinstance(value[0], list) else [value]
    if not all(isinstance(each, list) and 1 <= len(each) <= 2 for each in lists):
        raise ValueError(_EXPECTED)
    if not all(isinstance(text, str) for each in lists for text in each):
        raise ValueError(_EXPECTED)
    return tuple(map(tuple, lists)), lists is value


class PredictBody(TeiBody):
    inputs: Annotated[tuple[tuple[Given, ...], bool], PlainValidator(_to_given)]
    raw_scores: bool | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        inputs = tuple(_to_input(each, index) for index, each in enumerate(self.inputs[0]))
        call = ClassifyCall(**self.cut(request_id, adapter), inputs=inputs, per_token=False)
        return call.to_call(facts.classifier)


def _to_input(given: Given, index: int) -> Prompt:
    if len(given) == 1:
        return to_prompt(given[0], None)
    first, second = given
    field = f"inputs[{index}]"
    return Pair(first, second, (field, field))


@dataclass(frozen=True, slots=True)
class Predictions:
    """See `route.Answer`: all labels of each input, the most probable first; of a single text
    without a list around them."""

    rule: ClassifierRule
    is_raw: bool
    is_list: bool

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        results = classes(stream, self.rule, is_raw=self.is_raw)
        found = await collected(results, len(stream.requests), _predictions, memory)
        return found.joined() if self.is_list else found.items[0]


def _predictions(found: Classified) -> Iterator[bytes]:
    values = found.probabilities
    order = np.argsort(-values, kind="stable").tolist()
    made = [{"score": float(values[at]), "label": found.labels[at]} for at in order]
    yield to_json(made).encode()


class Predict:
    """See `route.Endpoint`."""

    body: ClassVar = PredictBody
    id_prefix: ClassVar = "classify"
    object: ClassVar = "list"

    def answer(self, body: PredictBody, facts: ServerFacts) -> Predictions:
        return Predictions(facts.classifier, bool(body.raw_scores), body.inputs[1])


class SimilarityInputs(Body):
    source_sentence: Annotated[str, Field(min_length=1)]
    sentences: Annotated[Texts, Field(max_length=MAX_INPUTS - 1)]


class SimilarityBody(PoolBody):
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        given, parameters = self.inputs, self.parameters or SimilarityParameters()
        texts = (*given.sentences, given.source_sentence)
        call = EmbedCall(
            **self.common(request_id, adapter),
            inputs=tuple(to_prompt(each, None) for each in texts),
            inputs_field="inputs.sentences",
            last_input_field="inputs.source_sentence",
            kept=kept_of(parameters.truncate, parameters.truncation_direction),
            option=PoolingOption(is_normalised=True),
            prompt_name=parameters.prompt_name or "",
        )
        return call.to_call(facts.embedding)


@dataclass(frozen=True, slots=True)
class Similarities:
    """See `route.Answer`: the cosine of each sentence's vector and the source's."""

    rule: EmbeddingRule

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        vectors: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(stream.requests)
        async with aclosing(embeddings(stream, self.rule)) as found:
            async for each in found:
                memory.add(each.vector.nbytes)
                vectors[each.index] = each.vector
        *others, source = vectors
        return [to_json([float(source @ each) for each in others]).encode()]


class Similarity:
    """See `route.Endpoint`."""

    body: ClassVar = SimilarityBody
    id_prefix: ClassVar = "embd"
    object: ClassVar = "list"

    def answer(self, body: SimilarityBody, facts: ServerFacts) -> Similarities:
        return Similarities(facts.embedding)


class TeiRoutes:
    """The routes without a body that is pooled."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def info(self, request: Request) -> Response:
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize(caller, Action.INFO))
        facts = self._service.facts
        return JSONResponse(
            {
                "model_id": facts.base_model,
                "model_dtype": facts.dtype,
                "model_type": _model_type(facts),
                "max_concurrent_requests": facts.max_queue,
                "max_input_length": _max_input_tokens(facts),
                "max_batch_tokens": facts.max_batch_tokens,
                "max_client_batch_size": MAX_INPUTS,
                "auto_truncate": False,
                "version": facts.versions.get("loadout", ""),
            }
        )

    async def refuse_sparse(self, request: Request) -> Response:
        """Raises HTTPException 501: no model here has sparse vectors."""
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize(caller, Action.GENERATE))
        raise HTTPException(501, "/embed_sparse: no sparse vectors (SPLADE) are served: use /embed")


def _max_input_tokens(facts: ServerFacts) -> int:
    """Returns the most tokens of an input of the model's type: only embeddings may have a limit
    below the context."""
    embeds = not (facts.classifier.labels or facts.embedding.refusal)
    return facts.max_input_tokens if embeds else facts.max_model_len


def _model_type(facts: ServerFacts) -> dict[str, Any] | None:
    """Returns the type by the words of text-embeddings-inference; None: the model neither embeds
    nor classifies."""
    labels = facts.classifier.labels
    if not labels:
        if facts.embedding.refusal:
            return None
        return {"embedding": {"pooling": POOLINGS[facts.embedding.pooling]}}
    by_id = {str(index): label for index, label in enumerate(labels)}
    by_label = {label: index for index, label in enumerate(labels)}
    kind = "reranker" if facts.scores_pairs else "classifier"
    return {kind: {"id2label": by_id, "label2id": by_label}}
