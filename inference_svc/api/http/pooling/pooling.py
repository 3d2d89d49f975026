"""/classify and /pooling, as vLLM has them: labels of inputs; and vectors or outputs of a
classifier, of inputs or of each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.pooling.embeddings import Vectors, encoded
from inference_svc.api.http.pooling.inputs import InputsBody, collected, listed
from inference_svc.api.http.response import AnswerMemory
from inference_svc.api.http.sse import to_json
from inference_svc.api.pooling.classify import (
    Classified,
    ClassifiedTokens,
    ClassifyCall,
    classes,
    token_classes,
)
from inference_svc.api.pooling.embed import MAX_DIMENSIONS, EmbedCall
from inference_svc.api.server_facts import ServerFacts
from inference_svc.results.classifier_rule import ClassifierRule
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import PoolingOption
from servicekit.errors import InvalidArgument

EMBED, TOKEN_EMBED, REWARD = "embed", "token_embed", "reward"
CLASSIFY, TOKEN_CLASSIFY = "classify", "token_classify"
OBJECT = "pooling"


class PoolingBody(InputsBody):
    """`task` absent: the task of the model's class, as with vLLM."""

    task: Literal["embed", "token_embed", "classify", "token_classify", "reward"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    use_activation: bool | None = None

    def task_of(self, facts: ServerFacts) -> str:
        if self.task is not None:
            return self.task
        if not facts.classifier.labels:
            return EMBED
        return TOKEN_CLASSIFY if facts.classifier.per_token else CLASSIFY

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        task, inputs = self.task_of(facts), self.with_inputs(request_id, adapter)
        if task not in (EMBED, TOKEN_EMBED):
            if self.dimensions is not None:
                raise InvalidArgument(
                    "dimensions: only with the tasks embed and token_embed", subject="dimensions"
                )
            per_token = task == TOKEN_CLASSIFY
            return ClassifyCall(**inputs, per_token=per_token).to_call(facts.classifier)
        pooling = Pooling.NONE if task == TOKEN_EMBED else None
        option = PoolingOption(pooling, self.use_activation, self.dimensions or 0)
        return EmbedCall(**inputs, option=option).to_call(facts.embedding)


@dataclass(frozen=True, slots=True)
class Outputs:
    """See `route.Answer`: the outputs of a classifier, of inputs or `per_token`."""

    rule: ClassifierRule
    per_token: bool
    is_raw: bool
    is_base64: bool

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        """The results are in the order of the inputs."""
        count = len(stream.requests)
        if self.per_token:
            of_tokens = token_classes(stream, self.rule, is_raw=self.is_raw)
            return listed(head, await collected(of_tokens, count, self._item, memory))
        of_inputs = classes(stream, self.rule, is_raw=self.is_raw)
        return listed(head, await collected(of_inputs, count, self._item, memory))

    def _item(self, found: Classified | ClassifiedTokens) -> Iterator[bytes]:
        yield b'{"object":"%b","index":%d,"data":' % (OBJECT.encode(), found.index)
        yield from encoded(found.probabilities, is_base64=self.is_base64)
        yield b"}"


class PoolingTasks:
    """See `route.Endpoint`."""

    body: ClassVar = PoolingBody
    id_prefix: ClassVar = "pool"
    object: ClassVar = "list"

    def answer(self, body: PoolingBody, facts: ServerFacts) -> Vectors | Outputs:
        task, is_base64 = body.task_of(facts), body.encoding_format == "base64"
        if task in (EMBED, TOKEN_EMBED):
            return Vectors(facts.embedding, is_base64, OBJECT, "data")
        # Rewards are the head's outputs as they are.
        is_raw = body.use_activation is False or (task == REWARD and not body.use_activation)
        return Outputs(facts.classifier, task == TOKEN_CLASSIFY, is_raw, is_base64)


class ClassifyBody(InputsBody):
    use_activation: bool | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        call = ClassifyCall(**self.with_inputs(request_id, adapter), per_token=False)
        return call.to_call(facts.classifier)


@dataclass(frozen=True, slots=True)
class Classes:
    """See `route.Answer`. If it `is_raw`, the head's outputs are in place of probabilities."""

    rule: ClassifierRule
    is_raw: bool

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        """The results are in the order of the inputs."""
        results = classes(stream, self.rule, is_raw=self.is_raw)
        return listed(head, await collected(results, len(stream.requests), _labelled, memory))


def _labelled(found: Classified) -> Iterator[bytes]:
    values = found.probabilities.tolist()
    fields = {"index": found.index, "label": found.label, "probs": values}
    yield to_json({**fields, "num_classes": len(values)}).encode()


class Classify:
    """See `route.Endpoint`."""

    body: ClassVar = ClassifyBody
    id_prefix: ClassVar = "classify"
    object: ClassVar = "list"

    def answer(self, body: ClassifyBody, facts: ServerFacts) -> Classes:
        return Classes(facts.classifier, body.use_activation is False)
