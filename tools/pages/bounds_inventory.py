"""Lists the subjects of rows in docs/limits.md from the code: the paths of fields in requests, and
the tables of the catalog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from pydantic import BaseModel

from adapter_store.api.bounds import REQUESTS as STORE_REQUESTS
from adapter_store.catalog.tables.schema import metadata
from inference_svc.api.grpc.bounds import request_bounds
from inference_svc.api.http.adapters import LoadBody, UnloadBody
from inference_svc.api.http.chat.endpoint import ChatBody
from inference_svc.api.http.completions import CompletionBody
from inference_svc.api.http.messages.body import CountBody, MessagesBody
from inference_svc.api.http.pooling.embeddings import EmbeddingsBody
from inference_svc.api.http.pooling.pooling import ClassifyBody, PoolingBody
from inference_svc.api.http.pooling.scores import RerankBody, ScoreBody
from inference_svc.api.http.pooling.tei import (
    EmbedAllBody,
    EmbedBody,
    PredictBody,
    SimilarityBody,
)
from inference_svc.api.http.responses.body import ResponsesBody
from inference_svc.api.http.tokenizer import DetokenizeBody, TokenizeBody
from inference_svc.api.http.tokens import TokensBody
from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.inference.v1 import inference_pb2
from servicekit.rpc.requests import RequestTable

STORE = adapter_store_pb2.DESCRIPTOR.services_by_name["AdapterStoreService"]
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
PULLED = ("PullAdapterResponse", "GetTextResponse")
"""Messages with an adapter's contents that an inference service reads."""

BODIES: Sequence[type[BaseModel]] = (
    ChatBody,
    CompletionBody,
    EmbeddingsBody,
    ClassifyBody,
    PoolingBody,
    EmbedBody,
    EmbedAllBody,
    PredictBody,
    SimilarityBody,
    ScoreBody,
    RerankBody,
    TokensBody,
    ResponsesBody,
    MessagesBody,
    CountBody,
    TokenizeBody,
    DetokenizeBody,
    LoadBody,
    UnloadBody,
)
"""All bodies of requests over HTTP; a test compares them with the routes' modules."""
SAMPLING = "sampling_params."
"""The object of one body for fields that the other bodies have at their top level."""

MAX_MODEL_LEN = 1 << 20
"""Represents `--max-model-len` in limits that depend on it."""
_WORDS = {2 * MAX_MODEL_LEN: "twice `--max-model-len`"}


def store_fields() -> set[str]:
    """Returns the fields of the store's requests, as "Method.path"."""
    return set(_fields_of(STORE))


def inference_fields() -> set[str]:
    """Returns the fields of the inference service's requests."""
    return set(_fields_of(INFERENCE))


def http_fields() -> set[str]:
    """Returns the fields of bodies over HTTP. A name has the same meaning in all bodies."""
    found = {path for body in BODIES for path in _of_body(body)}
    return {path.removeprefix(SAMPLING) for path in found} - {SAMPLING.removesuffix(".")}


def pulled_fields() -> set[str]:
    """Returns the fields of a store's answers to an inference service, as "Message.path"."""
    messages = adapter_store_pb2.DESCRIPTOR.message_types_by_name
    return {f"{name}.{path}" for name in PULLED for path in paths_of(messages[name])}


def tables() -> set[str]:
    """Returns the names of the catalog's tables."""
    return set(metadata.tables)


def limits(field: str, *, of_store: bool) -> list[str]:
    """Returns a field's maximum entries and characters from the tables of requests."""
    method, _, path = field.partition(".")
    table: RequestTable = STORE_REQUESTS if of_store else request_bounds(MAX_MODEL_LEN)
    bounds = table[method]
    found = []
    for counts, what in ((bounds.max_items, "entries"), (bounds.max_chars, "characters")):
        if path in counts:
            number = _WORDS.get(counts[path], f"{counts[path]:,}")
            found.append(f"{number} {what}")
    return found


def _fields_of(service: ServiceDescriptor) -> Iterator[str]:
    for method in service.methods:
        for path in paths_of(method.input_type):
            yield f"{method.name}.{path}"


def paths_of(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """Yields the paths of all fields, including fields of messages within the message."""
    for field in message.fields:
        path = prefix + field.name
        inner = field.message_type
        is_own = inner is not None and inner.file.package.startswith("loadout.")
        if field.is_repeated or not is_own:
            yield path
        if inner is not None and is_own and not inner.GetOptions().map_entry:
            yield from paths_of(inner, f"{path}.")


def _of_body(body: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in body.model_fields.items():
        path = prefix + (field.alias or name)
        inner = next(_models_in(field.annotation), None)
        if inner is None or get_origin(field.annotation) is not None:
            yield path
        if inner is not None:
            yield from _of_body(inner, f"{path}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the bodies within a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        if get_origin(annotation) is Annotated and each is not get_args(annotation)[0]:
            continue
        yield from _models_in(each)
