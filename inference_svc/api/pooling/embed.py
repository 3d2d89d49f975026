"""A call to embed, independent of its transport: its fields, their checks, and its vectors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.pooling.call import PoolCall, pooled_inputs
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.results.base import of_kind
from inference_svc.results.embedding_rule import EmbeddingRule
from inference_svc.results.pooling import HiddenSum, PoolingOption, pooled
from inference_svc.text.prompt import Prompt, Text
from servicekit.errors import InvalidArgument

MAX_DIMENSIONS = 1 << 20
MAX_PROMPT_NAME_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedCall(PoolCall):
    """`prompt_name` names one of the model's prompts, which goes before each text; "" is the
    model's default."""

    inputs: tuple[Prompt, ...]
    option: PoolingOption
    prompt_name: str = ""

    def to_call(self, rule: EmbeddingRule) -> GenerateCall:
        """Returns the call of a server that embeds by this rule. Raises InvalidArgument naming the
        field."""
        self._check_count(len(self.inputs))
        for index, each in enumerate(self.inputs):
            self._check_filled(index, bool(each.text if isinstance(each, Text) else each))
        prompt = self._prompt(rule)
        prompts = tuple(_with_prompt(each, prompt) for each in self.inputs)
        return self._to_call(prompts, self.option)

    def _prompt(self, rule: EmbeddingRule) -> str:
        """Returns the text that goes before each text."""
        if not self.prompt_name:
            return rule.prompts.get(rule.default_prompt, "")
        if self.prompt_name not in rule.prompts:
            known = ", ".join(sorted(rule.prompts)) or "none"
            raise InvalidArgument(
                f"prompt_name: the model has no prompt {self.prompt_name!a}; it has {known}",
                subject="prompt_name",
            )
        if not all(isinstance(each, Text) for each in self.inputs):
            raise InvalidArgument(
                "prompt_name: only with texts: nothing is put before token ids",
                subject="prompt_name",
            )
        return rule.prompts[self.prompt_name]


def _with_prompt(given: Prompt, prompt: str) -> Prompt:
    return replace(given, text=prompt + given.text) if isinstance(given, Text) else given


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of an input, fp32 [dimensions]."""

    index: int
    vector: NDArray[np.float32]
    usage: Usage
    timings: Timings


async def embeddings(stream: GenerateStream) -> AsyncGenerator[Embedded, None]:
    """Yields the vector of each input as it is there, in any order. Raises like
    `pooled_inputs`."""
    option = stream.call.wanted.get(PoolingOption)
    assert option is not None, "the call embeds"
    async with aclosing(pooled_inputs(stream)) as found:
        async for each in found:
            vector = pooled(of_kind(each.parts, HiddenSum), option)
            yield Embedded(each.index, vector, each.usage, each.timings)
