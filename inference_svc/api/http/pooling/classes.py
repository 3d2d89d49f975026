"""/classify, by vLLM's names: the labels of inputs."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.pooling.embeddings import Inputs, to_inputs, to_prompt
from inference_svc.api.http.pooling.route import PoolBody, to_usage
from inference_svc.api.http.response import AnswerMemory
from inference_svc.api.http.sse import to_json
from inference_svc.api.pooling.classify import Classified, ClassifyCall, classes
from inference_svc.api.server_facts import ServerFacts
from inference_svc.results.classifier_rule import ClassifierRule


class ClassifyBody(PoolBody):
    input: Annotated[Inputs, PlainValidator(to_inputs)]
    use_activation: bool | None = None
    add_special_tokens: bool | None = None

    def to_call(self, request_id: str, adapter: str, facts: ServerFacts) -> GenerateCall:
        inputs = tuple(to_prompt(each, self.add_special_tokens) for each in self.input)
        common = self.common(request_id, adapter)
        return ClassifyCall(**common, inputs=inputs, inputs_field="input").to_call()


@dataclass(frozen=True, slots=True)
class Classes:
    """See `route.Answer`. If it `is_raw`, the head's outputs are in place of probabilities."""

    rule: ClassifierRule
    is_raw: bool

    async def encode(
        self, stream: GenerateStream, head: dict[str, Any], memory: AnswerMemory
    ) -> list[bytes]:
        """The results are in the order of the inputs."""
        data = [b""] * len(stream.requests)
        num_tokens = num_cached = 0
        async with aclosing(classes(stream, self.rule, is_raw=self.is_raw)) as found:
            async for each in found:
                data[each.index] = _to_json(each)
                memory.add(len(data[each.index]))
                num_tokens += each.usage.prompt_tokens
                num_cached += each.usage.cached_prompt_tokens
                await asyncio.sleep(0)  # many labels take a while to write
        usage = to_usage(num_tokens, num_cached)
        start = to_json({**head, "usage": usage})[:-1].encode() + b',"data":['
        return [start, b",".join(data), b"]}"]


def _to_json(found: Classified) -> bytes:
    values = found.probabilities.tolist()
    fields = {"index": found.index, "label": found.label, "probs": values}
    return to_json({**fields, "num_classes": len(values)}).encode()


class Classify:
    """See `route.Endpoint`."""

    body: ClassVar = ClassifyBody
    id_prefix: ClassVar = "classify"
    object: ClassVar = "list"

    def answer(self, body: ClassifyBody, facts: ServerFacts) -> Classes:
        return Classes(facts.classifier, body.use_activation is False)
