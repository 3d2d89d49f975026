"""Calls of the inference service that pool inputs to vectors, scores and labels, as messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from loadout import types
from loadout._rpc.calls import Adapters, Service, StreamCall, only_unanswered
from loadout._rpc.convert import embedding as pooling_types
from loadout._rpc.convert.embedding import (
    POOLINGS,
    TRUNCATIONS,
    Inputs,
    LabelInputs,
    to_inputs,
)
from loadout._rpc.convert.messages import build, invalid, named
from loadout.inference.v1 import inference_pb2 as inference_pb

T = TypeVar("T")


def embed(
    inputs: Inputs, pooling: Any, truncation: Any, **fields: Any
) -> StreamCall[types.Embedding]:
    given = to_inputs(inputs)
    fields["truncation"] = _truncation(truncation)
    chosen = 0 if pooling is None else named(POOLINGS, pooling, "pooling")
    request = _pool(inference_pb.EmbedRequest, inputs=given, pooling=chosen, **fields)
    return _pooled("Embed", request, pooling_types.embedding, len(given))


def scores(documents: Sequence[str], truncation: Any, **fields: Any) -> StreamCall[types.Score]:
    """Raises InvalidArgument for one text in place of a list."""
    if isinstance(documents, str):  # a sequence of texts, too: its letters
        raise invalid("documents", "must be a list of texts, not one text")
    fields["truncation"] = _truncation(truncation)
    request = _pool(inference_pb.ScoreRequest, documents=documents, **fields)
    return _pooled("Score", request, pooling_types.score, len(documents))


def classify(
    inputs: LabelInputs, truncation: Any, **fields: Any
) -> StreamCall[types.Classification]:
    request = _classify_request(inputs, truncation, per_token=False, **fields)
    return _pooled("Classify", request, pooling_types.classification, len(request.inputs))


def classify_tokens(
    inputs: LabelInputs, truncation: Any, **fields: Any
) -> StreamCall[types.TokenClassification]:
    request = _classify_request(inputs, truncation, per_token=True, **fields)
    return _pooled("Classify", request, pooling_types.token_classification, len(request.inputs))


def _classify_request(
    inputs: LabelInputs, truncation: Any, **fields: Any
) -> inference_pb.ClassifyRequest:
    fields["truncation"] = _truncation(truncation)
    request = _pool(inference_pb.ClassifyRequest, inputs=to_inputs(inputs), **fields)
    return cast(inference_pb.ClassifyRequest, request)


def _truncation(given: Any) -> int:
    return 0 if given is None else named(TRUNCATIONS, given, "truncation")


def _pool(kind: type[Message], adapter: str | None, adapters: Adapters, **fields: Any) -> Any:
    parts = [part if isinstance(part, tuple) else (part, 1.0) for part in adapters]
    summed = [build(inference_pb.AdapterPart, ref=ref, scale=scale) for ref, scale in parts]
    return build(kind, adapter=adapter or "", adapters=summed, **fields)


def _pooled(rpc: str, request: Any, convert: Callable[[Any], T], num_items: int) -> StreamCall[T]:
    resume = only_unanswered(request)
    # A sum goes where its first adapter does.
    adapter = request.adapter or next((part.ref for part in request.adapters), "")
    return StreamCall(Service.INFERENCE, rpc, request, convert, resume, adapter, num_items)
