"""Inputs to embed as messages, and results as the client's types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

from loadout import types
from loadout._rpc.convert.from_inference import identity, timings, usage
from loadout._rpc.convert.messages import build, invalid
from loadout.inference.v1 import inference_pb2 as inference_pb

FP32_BYTES = 4
Inputs = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""Inputs to embed: one text or list of token ids, or several."""
LabelInputs = Inputs | Sequence[tuple[str, str]]
"""Inputs to classify: also a list of pairs of texts."""

_Response: TypeAlias = (
    inference_pb.EmbedResponse | inference_pb.ScoreResponse | inference_pb.ClassifyResponse
)

POOLINGS: dict[int, str] = {
    inference_pb.POOLING_LAST: "last",
    inference_pb.POOLING_MEAN: "mean",
    inference_pb.POOLING_FIRST: "first",
    inference_pb.POOLING_NONE: "none",
}
TRUNCATIONS: dict[int, str] = {
    inference_pb.TRUNCATION_END: "end",
    inference_pb.TRUNCATION_START: "start",
}


def to_inputs(inputs: LabelInputs) -> list[inference_pb.EmbedInput]:
    """Returns the messages of inputs. Raises InvalidArgument, naming the input."""
    if isinstance(inputs, str) or (inputs and all(isinstance(each, int) for each in inputs)):
        return [_to_input(inputs, "inputs")]
    return [_to_input(each, f"inputs[{index}]") for index, each in enumerate(inputs)]


def _to_input(given: object, field: str) -> inference_pb.EmbedInput:
    if not isinstance(given, str | Iterable):
        raise invalid(field, "must be a text, a pair of texts, or token ids")
    value: dict[str, object] = {"text": given}
    if not isinstance(given, str):
        parts = list(given)
        if len(parts) == 2 and all(isinstance(each, str) for each in parts):
            value = {"pair": build(inference_pb.TextPair, field, first=parts[0], second=parts[1])}
        else:
            value = {"token_ids": build(inference_pb.TokenIds, field, ids=parts)}
    return cast(inference_pb.EmbedInput, build(inference_pb.EmbedInput, field, **value))


def embedding(message: inference_pb.EmbedResponse) -> types.Embedding:
    vector = _values(message.embedding, message.num_tokens)
    return types.Embedding(vector=vector, **_common(message))


def _values(content: bytes, num_tokens: int) -> memoryview[float]:
    """Returns numbers; with tokens as [tokens, numbers]."""
    if not num_tokens:
        return memoryview(content).cast("f")
    return memoryview(content).cast("f", [num_tokens, len(content) // FP32_BYTES // num_tokens])


def joined_embedding(parts: Sequence[types.Embedding]) -> types.Embedding:
    """Returns the vectors of all of an input's responses."""
    vector = _joined([part.vector for part in parts])
    return dataclasses.replace(parts[-1], vector=vector)


def joined_tokens(parts: Sequence[types.TokenClassification]) -> types.TokenClassification:
    """Returns the labels of all of an input's responses."""
    probabilities = _joined([part.probabilities for part in parts])
    return dataclasses.replace(parts[-1], probabilities=probabilities)


def _joined(views: Sequence[memoryview[float]]) -> memoryview[float]:
    if len(views) == 1:
        return views[0]
    return _values(b"".join(view.tobytes() for view in views), sum(map(len, views)))


def score(message: inference_pb.ScoreResponse) -> types.Score:
    return types.Score(score=message.score, **_common(message))


def classification(message: inference_pb.ClassifyResponse) -> types.Classification:
    return types.Classification(
        label=message.label,
        label_index=message.label_index,
        probabilities=memoryview(message.probabilities).cast("f"),
        **_common(message),
    )


def token_classification(message: inference_pb.ClassifyResponse) -> types.TokenClassification:
    return types.TokenClassification(
        labels=tuple(message.labels),
        probabilities=_values(message.probabilities, message.num_tokens),
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
