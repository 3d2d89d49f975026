"""A call to embed, independent of its transport: its fields, their checks, and its vectors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.pooling.call import PoolCall, of_tokens, pooled_inputs
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.results.base import FP32_BYTES, of_kind
from inference_svc.results.embedding_rule import EmbeddingRule
from inference_svc.results.pooling import (
    HiddenSum,
    PoolingOption,
    TokenStates,
    pooled,
    token_vectors,
)
from inference_svc.text.cut import NO_LIMIT, PromptLimit
from inference_svc.text.prompt import Prompt, Text
from servicekit.errors import InvalidArgument

MAX_DIMENSIONS = 1 << 20
MAX_PROMPT_NAME_CHARS = 64
MAX_TOKENS = (
    "max_seq_length in sentence_*_config.json, else model_max_length in tokenizer_config.json"
)
"""Where the model's folder says how many tokens an input may have."""


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
        prompts = tuple(_with_prompt(each, prompt, rule) for each in self.inputs)
        limit = PromptLimit(rule.max_tokens, why=f"are embedded by this model ({MAX_TOKENS})")
        token_bytes = FP32_BYTES * max(rule.state_size, 1) if self.option.per_token else 0
        return self._to_call(
            prompts, self.option, limit if rule.max_tokens else NO_LIMIT, token_bytes
        )

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


def _with_prompt(given: Prompt, prompt: str, rule: EmbeddingRule) -> Prompt:
    if not isinstance(given, Text):
        return given
    text = prompt + given.text
    return replace(given, text=text.lower() if rule.lowercases else text)


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of an input, fp32 [dimensions], or of each of its tokens, [tokens, dimensions]."""

    index: int
    vector: NDArray[np.float32]
    usage: Usage
    timings: Timings


async def embeddings(stream: GenerateStream, rule: EmbeddingRule) -> AsyncGenerator[Embedded, None]:
    """Yields the vectors of each input as they are there, in any order, as the model makes them.
    Raises like `pooled_inputs`."""
    option = stream.call.wanted.get(PoolingOption)
    assert option is not None, "the call embeds"
    async with aclosing(pooled_inputs(stream)) as found:
        async for each in found:
            if option.per_token:
                blocks = [part.rows for part in of_kind(each.parts, TokenStates)]
                vector = await of_tokens(blocks, partial(token_vectors, option=option))
                blocks.clear()
                each.parts.clear()  # their memory is counted for the vectors, until they are read
            else:
                vector = pooled(of_kind(each.parts, HiddenSum), option, rule.dense)
            yield Embedded(each.index, vector, each.usage, each.timings)
