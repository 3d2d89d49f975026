"""Inputs to embed as messages, and results as the client's types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

from loadout import types
from loadout._rpc.convert.from_inference import identity, timings, usage
from loadout._rpc.convert.messages import build, invalid
from loadout.inference.v1 import inference_pb2 as inference_pb

Inputs = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""Inputs to embed: one text or list of token ids, or several."""

_Response: TypeAlias = (
    inference_pb.EmbedResponse | inference_pb.ScoreResponse | inference_pb.ClassifyResponse
)

POOLINGS: dict[int, str] = {
    inference_pb.POOLING_LAST: "last",
    inference_pb.POOLING_MEAN: "mean",
    inference_pb.POOLING_FIRST: "first",
}


def to_inputs(inputs: Inputs) -> list[inference_pb.EmbedInput]:
    """Returns the messages of inputs. Raises InvalidArgument, naming the input."""
    if isinstance(inputs, str) or (inputs and all(isinstance(each, int) for each in inputs)):
        return [_to_input(inputs, "inputs")]
    return [_to_input(each, f"inputs[{index}]") for index, each in enumerate(inputs)]


def _to_input(given: object, field: str) -> inference_pb.EmbedInput:
    if not isinstance(given, str | Iterable):
        raise invalid(field, "must be a text, or token ids")
    value: dict[str, object] = {"text": given}
    if not isinstance(given, str):
        value = {"token_ids": build(inference_pb.TokenIds, field, ids=given)}
    return cast(inference_pb.EmbedInput, build(inference_pb.EmbedInput, field, **value))


def embedding(message: inference_pb.EmbedResponse) -> types.Embedding:
    return types.Embedding(vector=memoryview(message.embedding).cast("f"), **_common(message))


def score(message: inference_pb.ScoreResponse) -> types.Score:
    return types.Score(score=message.score, **_common(message))


def classification(message: inference_pb.ClassifyResponse) -> types.Classification:
    return types.Classification(
        label=message.label,
        label_index=message.label_index,
        probabilities=memoryview(message.probabilities).cast("f"),
        **_common(message),
    )


def _common(message: _Response) -> dict[str, Any]:
    return {
        "request_id": message.request_id,
        "index": message.index,
        "adapter": identity(message.adapter) if message.HasField("adapter") else None,
        "adapters": tuple(map(identity, message.adapters)),
        "usage": usage(message.usage) if message.HasField("usage") else None,
        "timings": timings(message.timings) if message.HasField("timings") else None,
    }
