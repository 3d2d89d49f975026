"""Results that come beside tokens, as the client's types: read from a response, and joined over a
generation. A new kind of result has an entry in RESULTS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from loadout import types
from loadout.inference.v1 import inference_pb2


class Result(NamedTuple):
    """One kind of result. `read` takes a response. `joined` takes the values of a generation's
    chunks in order, without absent ones, which are None or empty."""

    read: Callable[[inference_pb2.GenerateResponse], Any]
    joined: Callable[[list[Any]], Any]


def of_response(message: inference_pb2.GenerateResponse) -> dict[str, Any]:
    """Returns the fields of a Chunk."""
    return {name: result.read(message) for name, result in RESULTS.items()}


def joined(chunks: Sequence[types.Chunk]) -> dict[str, Any]:
    """Returns the fields of a Completion."""
    values = {name: [getattr(chunk, name) for chunk in chunks] for name in RESULTS}
    return {
        name: result.joined([value for value in values[name] if value])
        for name, result in RESULTS.items()
    }


def _token_logprobs(message: inference_pb2.TokenLogprobs) -> types.TokenLogprobs:
    chosen = types.Logprob(message.chosen.token_id, message.chosen.logprob)
    top = tuple(types.Logprob(each.token_id, each.logprob) for each in message.top)
    return types.TokenLogprobs(chosen, top)


def _read_logprobs(message: inference_pb2.GenerateResponse) -> tuple[types.TokenLogprobs, ...]:
    return tuple(map(_token_logprobs, message.logprobs))


def _chained(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(each for part in parts for each in part)


def _read_experts(message: inference_pb2.GenerateResponse) -> types.RoutedExperts | None:
    if not message.HasField("routed_experts"):
        return None
    experts = message.routed_experts
    return types.RoutedExperts(
        first_position=experts.first_position,
        num_tokens=experts.num_tokens,
        num_layers=experts.num_layers,
        num_chosen=experts.num_chosen,
        bytes_per_id=experts.bytes_per_id,
        experts=experts.experts,
    )


def _joined_experts(parts: list[types.RoutedExperts]) -> types.RoutedExperts | None:
    """Joins the experts of neighbouring tokens."""
    if not parts:
        return None
    num_tokens = sum(part.num_tokens for part in parts)
    experts = b"".join(part.experts for part in parts)
    return replace(parts[0], num_tokens=num_tokens, experts=experts)


def _read_packed(
    field: str,
) -> Callable[[inference_pb2.GenerateResponse], types.PackedLogprobs | None]:
    def read(response: inference_pb2.GenerateResponse) -> types.PackedLogprobs | None:
        if not response.HasField(field):
            return None
        message: inference_pb2.PackedLogprobs = getattr(response, field)
        arrays = {name: getattr(message, name) for name in _ARRAYS}
        return _packed(message.first_position, message.num_tokens, message.top_k, **arrays)

    return read


_ARRAYS = ("token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs")


def _packed(
    first_position: int,
    num_tokens: int,
    top_k: int,
    *,
    token_ids: bytes,
    logprobs: bytes,
    ranks: bytes,
    top_token_ids: bytes,
    top_logprobs: bytes,
) -> types.PackedLogprobs:
    # A view without elements has one dimension: memoryviews know no others.
    ids, values = memoryview(top_token_ids).cast("i"), memoryview(top_logprobs).cast("f")
    if top_token_ids:
        shape = num_tokens, top_k
        ids, values = ids.cast("B").cast("i", shape), values.cast("B").cast("f", shape)
    return types.PackedLogprobs(
        first_position,
        num_tokens,
        top_k,
        token_ids=memoryview(token_ids).cast("i"),
        logprobs=memoryview(logprobs).cast("f"),
        ranks=memoryview(ranks).cast("i"),
        top_token_ids=ids,
        top_logprobs=values,
    )


def _joined_packed(parts: list[types.PackedLogprobs]) -> types.PackedLogprobs | None:
    """Joins the arrays of neighbouring tokens."""
    if len(parts) < 2:
        return parts[0] if parts else None
    arrays = {name: b"".join(getattr(part, name).tobytes() for part in parts) for name in _ARRAYS}
    num_tokens = sum(part.num_tokens for part in parts)
    return _packed(parts[0].first_position, num_tokens, parts[0].top_k, **arrays)


RESULTS = {
    "logprobs": Result(_read_logprobs, _chained),
    "routed_experts": Result(_read_experts, _joined_experts),
    "packed_logprobs": Result(_read_packed("packed_logprobs"), _joined_packed),
    "prompt_logprobs": Result(_read_packed("prompt_logprobs"), _joined_packed),
}
"""By the field of a Chunk and of a Completion."""
