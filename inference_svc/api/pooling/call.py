"""A call that pools inputs instead of generating, whatever the result: its common fields, limits,
and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.core import FinishReason, SamplingParams
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.errors import Interrupted
from inference_svc.results.base import Option, ResultPart, Wanted
from inference_svc.results.pooling import HiddenSum
from inference_svc.text.cut import Kept, PromptLimit
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 300_000
"""Inputs of a call, and tokens of all of them: as many as OpenAI allows."""
MAX_TOKEN_BYTES = 128 << 20
"""Results for each token of all inputs of a call, in fp32: no more are computed."""
MAX_RUNNING = 64
"""Inputs of a call that are in the engine at once, if as many may run: they fill its steps."""
SLICE_NUMBERS = 1 << 16
"""Numbers of tokens' results that are made at once: it takes a millisecond."""

NOTHING_GENERATED = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCall:
    """The common fields. `inputs_field`, `adapter_field` and `max_tokens_field` are the caller's
    names of these, `last_input_field` its name of the last input if this is no item of them. An
    input of more than `max_tokens`, 0 for as many as the model takes, is refused unless some are
    `kept`."""

    request_id: str
    adapter: str
    parts: tuple[tuple[str, float], ...] = ()
    min_revision: int = 0
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    max_tokens: int = 0
    kept: Kept | None = None
    max_tokens_field: str = "max_tokens"
    inputs_field: str = "inputs"
    last_input_field: str = ""
    adapter_field: str = "adapter"
    is_id_unique: bool = True

    def _to_call(
        self, prompts: Sequence[Prompt], option: Option, limit: PromptLimit, token_bytes: int = 0
    ) -> GenerateCall:
        """Returns the call, whose results have so many bytes for each token if they are of tokens,
        and whose inputs keep the model's limit. Raises InvalidArgument for a higher one."""
        if limit.max_tokens and self.max_tokens > limit.max_tokens:
            field = self.max_tokens_field
            raise InvalidArgument(
                f"{field}: at most {limit.max_tokens} {limit.why}, not {self.max_tokens}",
                subject=field,
            )
        most = MAX_TOKEN_BYTES // token_bytes if token_bytes else MAX_INPUT_TOKENS
        if self.max_tokens:
            limit = PromptLimit(self.max_tokens, why=f"are allowed by {self.max_tokens_field}")
        return GenerateCall(
            request_id=self.request_id,
            adapter=self.adapter,
            prompts=prompts,
            sampling=NOTHING_GENERATED,
            min_revision=self.min_revision,
            priority=self.priority,
            cache_salt=self.cache_salt,
            deadline_s=self.deadline_s,
            adapter_field=self.adapter_field,
            is_id_unique=self.is_id_unique,
            parts=self.parts,
            wanted=Wanted((option,)),
            prompts_field=self.inputs_field,
            last_prompt_field=self.last_input_field,
            max_running=MAX_RUNNING,
            max_prompt_tokens=min(most, MAX_INPUT_TOKENS),
            prompt_limit=replace(limit, kept=self.kept),
        )

    def _check_count(self, count: int) -> None:
        """Raises InvalidArgument."""
        field = self.inputs_field
        if not 1 <= count <= MAX_INPUTS:
            raise InvalidArgument(
                f"{field} must have 1 to {MAX_INPUTS} items, not {count}", subject=field
            )

    def _check_filled(self, index: int, is_filled: bool) -> None:
        """Raises InvalidArgument naming the input."""
        if not is_filled:
            field = f"{self.inputs_field}[{index}]"
            raise InvalidArgument(f"{field} must not be empty", subject=field)


@dataclass(frozen=True, slots=True)
class PooledInput:
    """All results of an input; sums are added up."""

    index: int
    parts: list[ResultPart]
    usage: Usage
    timings: Timings


async def pooled_inputs(stream: GenerateStream) -> AsyncGenerator[PooledInput, None]:
    """Yields each input as it is done, in any order. Raises Interrupted for an input that was ended
    before, and like `GenerateStream.deltas`."""
    parts: list[list[ResultPart]] = [[] for _ in stream.requests]
    async with stream.deltas() as deltas, aclosing(deltas):
        async for index, delta in deltas:
            for part in delta.parts:
                _add(parts[index], part)
            if delta.finish_reason is None:
                continue
            if delta.finish_reason is FinishReason.ABORTED:
                raise Interrupted("the request was ended before its inputs were computed")
            assert delta.usage is not None
            assert delta.timings is not None
            found, parts[index] = parts[index], []
            yield PooledInput(index, found, delta.usage, delta.timings)


async def of_tokens(
    blocks: Sequence[NDArray[np.float32]],
    change: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Returns the results of an input's tokens, [tokens, numbers]: what `change` makes of each
    row of the `blocks`, [_, numbers]. It gets a few rows at a time, between which other calls have
    a turn, since all rows of a long input may take a second."""
    num_rows, at = sum(map(len, blocks)), 0
    made = np.empty((0, 0), np.float32)
    for block in blocks:
        step = max(1, SLICE_NUMBERS // block.shape[1])
        for first in range(0, len(block), step):
            rows = change(block[first : first + step])
            if not at:
                made = np.empty((num_rows, rows.shape[1]), np.float32)
            made[at : at + len(rows)] = rows
            at += len(rows)
            await asyncio.sleep(0)
    return made


def _add(parts: list[ResultPart], part: ResultPart) -> None:
    """Adds a part. A long input has a sum of each step: one vector is kept of all."""
    last = parts[-1] if parts else None
    if isinstance(part, HiddenSum) and isinstance(last, HiddenSum):
        parts[-1] = last.plus(part)
    else:
        parts.append(part)
