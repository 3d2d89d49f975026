"""The inputs of bodies that embed and classify, and the bytes of answers to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainValidator

from inference_svc.api.http.completions import are_ids
from inference_svc.api.http.pooling.route import PoolBody, to_usage
from inference_svc.api.http.response import AnswerMemory
from inference_svc.api.http.sse import to_json
from inference_svc.api.pooling.call import MAX_INPUTS
from inference_svc.engine.transport.messages import Usage
from inference_svc.text.cut import Kept
from inference_svc.text.prompt import Prompt, Text
from servicekit.errors import InvalidArgument

Inputs = tuple[str | tuple[int, ...], ...]
Direction = Literal["Left", "Right", "left", "right"]
MAX_TRUNCATED_TOKENS = (1 << 32) - 1


def to_inputs(value: object) -> Inputs:
    """Accepts a text, token ids, or a list of one of these. Raises ValueError for anything else."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if are_ids(value):
            return (tuple(value),)
        if len(value) > MAX_INPUTS:
            raise ValueError(f"must have at most {MAX_INPUTS} items, not {len(value)}")
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if all(map(are_ids, value)):
            return tuple(map(tuple, value))
    raise ValueError("must be a text, a list of token ids, or a list of one of these")


def to_prompt(given: str | tuple[int, ...], add_special_tokens: bool | None) -> Prompt:
    return Text(given, add_special_tokens is not False) if isinstance(given, str) else given


def kept_of(truncate: bool | None, direction: str | None) -> Kept | None:
    """Returns the tokens that are kept of an input that is too long, by the words of
    text-embeddings-inference; None: it is refused."""
    if not truncate:
        return None
    return Kept.LAST if (direction or "").lower() == "left" else Kept.FIRST


class CutBody(PoolBody):
    """The fields of bodies whose prompts may be cut, by vLLM's names."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TRUNCATED_TOKENS)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    def cut(self, request_id: str, adapter: str) -> dict[str, Any]:
        """Returns the fields of `PoolCall`. Raises InvalidArgument."""
        most, side = self.truncate_prompt_tokens, self.truncation_side
        if most == 0:
            raise InvalidArgument(
                "truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes",
                subject="truncate_prompt_tokens",
            )
        kept = None if most is None else Kept.LAST if side == "left" else Kept.FIRST
        return {
            **self.common(request_id, adapter),
            "kept": kept,
            "max_tokens": max(most or 0, 0),
            "max_tokens_field": "truncate_prompt_tokens",
        }


class InputsBody(CutBody):
    """The fields of bodies that have inputs, by the names of OpenAI and vLLM."""

    input: Annotated[Inputs, PlainValidator(to_inputs)]
    add_special_tokens: bool | None = None

    def with_inputs(self, request_id: str, adapter: str) -> dict[str, Any]:
        """Returns the fields of `PoolCall`, and its inputs. Raises InvalidArgument."""
        return {
            **self.cut(request_id, adapter),
            "inputs": tuple(to_prompt(each, self.add_special_tokens) for each in self.input),
            "inputs_field": "input",
        }


class Pooled(Protocol):
    """A result of one input of a call."""

    @property
    def index(self) -> int: ...
    @property
    def usage(self) -> Usage: ...


R = TypeVar("R", bound=Pooled)


@dataclass(frozen=True, slots=True)
class Collected:
    """The JSON of each result of a call, in the order of its inputs, and the usage of all."""

    items: list[list[bytes]]
    usage: dict[str, Any]

    def joined(self) -> list[bytes]:
        """Returns the JSON list of all results."""
        parts = [b"["]
        for item in self.items:
            parts += (*item, b",")
        parts[-1] = b"]"
        return parts


async def collected(
    results: AsyncGenerator[R, None],
    count: int,
    encode: Callable[[R], Iterator[bytes]],
    memory: AnswerMemory,
) -> Collected:
    """Encodes the results of a call with so many inputs as they come, each in pieces. Raises
    ShareExceeded, and like `results`."""
    items: list[list[bytes]] = [[] for _ in range(count)]
    num_tokens = num_cached = 0
    async with aclosing(results) as found:
        async for each in found:
            for piece in encode(each):
                items[each.index].append(piece)
                memory.add(len(piece))
                await asyncio.sleep(0)  # many numbers take a while to write
            num_tokens += each.usage.prompt_tokens
            num_cached += each.usage.cached_prompt_tokens
    return Collected(items, to_usage(num_tokens, num_cached))


def rows(values: NDArray[np.float32]) -> Iterator[bytes]:
    """Yields the JSON of numbers, [N] or [tokens, N], in pieces of one row."""
    if values.ndim == 1:
        yield to_json(values.tolist()).encode()
        return
    start = b"["
    for row in values:
        yield start + to_json(row.tolist()).encode()
        start = b","
    yield b"]"


def listed(head: dict[str, Any], found: Collected) -> list[bytes]:
    """Returns an answer with its results in `data`, as OpenAI and vLLM have it."""
    start = to_json({**head, "usage": found.usage})[:-1].encode() + b',"data":'
    return [start, *found.joined(), b"}"]
