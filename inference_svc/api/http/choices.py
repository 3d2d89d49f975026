"""What the choices of a response share: their finish reasons, their usage, and slices of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from inference_svc.api.generate_stream import GenerateStream
from inference_svc.core import FinishReason
from inference_svc.engine.messages import Usage
from inference_svc.frontend.output_stream import Delta

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}

SLICE_TOKENS = 32
"""Tokens with logprobs that are formatted before other requests may run."""


def to_usage(usages: Sequence[Usage], per_prompt: int) -> dict[str, Any]:
    """Sums the usage of all choices in order, `per_prompt` of each prompt, which counts once."""
    firsts = usages[::per_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    cached_tokens = sum(usage.cached_prompt_tokens for usage in firsts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


async def in_slices(stream: GenerateStream) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yields the stream's deltas in slices, and lets the event loop run others between SLICE_TOKENS
    tokens with logprobs. To be closed like the deltas."""
    num_tokens = 0
    async with aclosing(stream.deltas()) as deltas:
        async for index, delta in deltas:
            for each in _slices(delta):
                num_tokens += len(each.logprobs)
                if num_tokens > SLICE_TOKENS:
                    num_tokens = len(each.logprobs)
                    await asyncio.sleep(0)
                yield index, each


def _slices(delta: Delta) -> Iterator[Delta]:
    """Splits a delta by its logprobs, which take long to format: what a slow reader has not read
    grows without a bound. The text is in the last slice."""
    num_tokens = len(delta.logprobs)
    last = max(num_tokens - 1, 0) // SLICE_TOKENS * SLICE_TOKENS
    for start in range(0, last, SLICE_TOKENS):
        part = slice(start, start + SLICE_TOKENS)
        yield Delta(delta.token_ids[part], logprobs=delta.logprobs[part])
    if last:
        delta = replace(delta, token_ids=delta.token_ids[last:], logprobs=delta.logprobs[last:])
    yield delta
