"""A call to embed, independent of its transport: its fields, their checks, and its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.core import FinishReason, SamplingParams
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.errors import Interrupted
from inference_svc.results.base import Wanted, of_kind
from inference_svc.results.embedding_rule import EmbeddingRule
from inference_svc.results.pooling import HiddenSum, PoolingOption, pooled
from inference_svc.text.prompt import Prompt, Text
from servicekit.errors import InvalidArgument

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 300_000
"""Inputs of a call, and tokens of all of them: as many as OpenAI allows."""
MAX_DIMENSIONS = 1 << 20
MAX_PROMPT_NAME_CHARS = 64
MAX_RUNNING = 64
"""Inputs of a call that are in the engine at once: as many as fill its steps."""

NOTHING_GENERATED = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """The fields of a call to embed, by the caller's names of `inputs_field` and `adapter_field`.
    `prompt_name` names one of the model's prompts, which goes before each text; "" is the model's
    default."""

    request_id: str
    adapter: str
    inputs: tuple[Prompt, ...]
    option: PoolingOption
    prompt_name: str = ""
    parts: tuple[tuple[str, float], ...] = ()
    min_revision: int = 0
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    inputs_field: str = "inputs"
    adapter_field: str = "adapter"
    is_id_unique: bool = True

    def to_call(self, rule: EmbeddingRule) -> GenerateCall:
        """Returns the call of a server that embeds by this rule. Raises InvalidArgument naming the
        field."""
        self._check()
        prompt = self._prompt(rule)
        return GenerateCall(
            request_id=self.request_id,
            adapter=self.adapter,
            prompts=tuple(_with_prompt(each, prompt) for each in self.inputs),
            sampling=NOTHING_GENERATED,
            min_revision=self.min_revision,
            priority=self.priority,
            cache_salt=self.cache_salt,
            deadline_s=self.deadline_s,
            adapter_field=self.adapter_field,
            is_id_unique=self.is_id_unique,
            parts=self.parts,
            wanted=Wanted((self.option,)),
            prompts_field=self.inputs_field,
            max_running=MAX_RUNNING,
            max_prompt_tokens=MAX_INPUT_TOKENS,
        )

    def _check(self) -> None:
        field, count = self.inputs_field, len(self.inputs)
        if not 1 <= count <= MAX_INPUTS:
            raise InvalidArgument(
                f"{field} must have 1 to {MAX_INPUTS} items, not {count}", subject=field
            )
        for index, each in enumerate(self.inputs):
            if not (each.text if isinstance(each, Text) else each):
                raise InvalidArgument(
                    f"{field}[{index}] must not be empty", subject=f"{field}[{index}]"
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


def _with_prompt(given: Prompt, prompt: str) -> Prompt:
    return replace(given, text=prompt + given.text) if isinstance(given, Text) else given


class Embedded(NamedTuple):
    """The vector of an input, fp32 [dimensions]."""

    index: int
    vector: NDArray[np.float32]
    usage: Usage
    timings: Timings


async def embeddings(stream: GenerateStream) -> AsyncGenerator[Embedded, None]:
    """Yields the vector of each input as it is there, in any order. Raises Interrupted for one that
    was ended before, and like `GenerateStream.deltas`."""
    option = stream.call.wanted.get(PoolingOption)
    assert option is not None, "the call embeds"
    sums: Sequence[list[HiddenSum]] = [[] for _ in stream.requests]
    async with stream.deltas() as deltas, aclosing(deltas):
        async for index, delta in deltas:
            sums[index] += of_kind(delta.parts, HiddenSum)
            if delta.finish_reason is None:
                continue
            if delta.finish_reason is FinishReason.ABORTED:
                raise Interrupted("the request was ended before its inputs were embedded")
            assert delta.usage is not None
            assert delta.timings is not None
            vector = pooled(sums[index], option)
            sums[index].clear()
            yield Embedded(index, vector, delta.usage, delta.timings)
