"""Fuzzes messages to either service, from their bytes to the converted request."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import Message

from adapter_store.api import convert as store_convert
from adapter_store.api.bounds import REQUESTS as STORE_REQUESTS
from adapter_store.catalog.tables.filters import parse_filter
from adapter_store.images.plan import layout as layouts
from adapter_store.images.plan.announcement import announcement_id, validate_announcement
from fuzz.folders import run_now
from fuzz.refusals import refused
from inference_svc.api.generate_call import (
    MAX_CHOICES,
    MAX_PART_SCALE,
    MAX_STOP_TOKEN_IDS,
    GenerateCall,
)
from inference_svc.api.grpc import convert as inference_convert
from inference_svc.api.grpc.bounds import request_bounds
from inference_svc.api.grpc.pooling import (
    from_classify_request,
    from_embed_request,
    from_score_request,
)
from inference_svc.api.grpc.prompts import from_tokenize_request
from inference_svc.api.grpc.uploads import from_upload
from inference_svc.core import MAX_PARTS, Request
from inference_svc.pictures.uploads import UploadKey, Uploads
from inference_svc.results.classifier_rule import ClassifierRule
from inference_svc.results.embedding_rule import EmbeddingRule
from inference_svc.results.logprobs import MAX_LOGPROBS, LogprobsOption
from inference_svc.results.scores import ScoresOption
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.chat import Chat
from inference_svc.text.pair import Encoded, Pair
from inference_svc.text.prompt import Prompt, Question, Text
from loadout.inference.v1 import inference_pb2 as inference_pb
from servicekit.errors import InvalidArgument
from servicekit.refs import DEFAULT_TENANT, parse_ref, parse_sha256
from servicekit.rpc.requests import RequestTable

SEPARATOR = b"\xff\xff\xff\xff"
LAYOUT_ID = f"sha256:{'0' * 64}"
DIGEST = f"sha256:{'1' * 64}"
BASE_MODEL = "base"
VOCABULARY, MODEL_LEN = 1000, 64
RULE = EmbeddingRule(64, prompts={"query": "find: "})
LABELS = ClassifierRule(("sad", "happy"))
GENERATES: Any = SimpleNamespace(generates=True, base_model="base")
CROSS_ENCODER: Any = SimpleNamespace(generates=False, base_model="base")
EOS_TOKEN_IDS = (2,)
ADDED_TOKENS = 3
INVOCATION_TOKENS = (7, 8)


def fuzz_store_request(data: bytes) -> None:
    """Reads a message to the store: a method's name, a separator and the message's bytes."""
    _fuzz_request(STORE_REQUESTS, _STORE_CONVERSIONS, data)


def fuzz_inference_request(data: bytes) -> None:
    """Reads a message to the inference service, in the form of `fuzz_store_request`."""
    _fuzz_request(_INFERENCE_REQUESTS, _INFERENCE_CONVERSIONS, data)


def _fuzz_request(
    table: RequestTable, conversions: Mapping[str, Callable[[Any], object]], data: bytes
) -> None:
    name, _, raw = data.partition(SEPARATOR)
    method = name.decode("ascii", "replace")
    if method not in table:
        return
    with refused(InvalidArgument):
        request = table[method].parse(raw)
        for path, limit in table[method].max_items.items():
            assert len(_entries(request, path)) <= limit, "more entries than allowed"
        if method in conversions:
            conversions[method](request)


def _entries(request: Any, path: str) -> list[Any]:
    """Returns all entries of a field, also across the entries of an outer field."""
    values = [request]
    for part in path.split("."):
        found = [getattr(value, part) for value in values]
        values = [
            entry for each in found for entry in ([each] if isinstance(each, Message) else each)
        ]
    return values


async def _upload(request: Any) -> None:
    async def requests() -> AsyncIterator[Any]:
        yield request
        yield request

    _, chunks = await store_convert.from_upload(requests())
    async for _ in chunks:
        pass


async def _upload_image(request: Any) -> None:
    """Sends a piece after a description, or a description before a piece."""

    async def requests() -> AsyncIterator[Any]:
        if request.WhichOneof("part") == "chunk":
            described = inference_pb.ImageUpload(size_bytes=len(request.chunk))
            yield inference_pb.UploadImageRequest(upload=described)
        yield request
        if request.WhichOneof("part") == "upload":
            yield inference_pb.UploadImageRequest(chunk=b"a file")

    uploads = Uploads("uploads", 1 << 26)
    size, salt, pieces = await from_upload(requests())
    with uploads.begin("account", size) as file:
        async for piece in pieces:
            file.add(piece)
        assert uploads.hold(UploadKey("account", salt, file.keep(salt)))
    uploads.check_integrity()


def _register_layout(request: Any) -> None:
    layout = store_convert.from_layout(request.layout)
    layouts.validate(layout)
    announcement = store_convert.from_announcement(request)
    validate_announcement(announcement, layout)
    parse_sha256(announcement_id(LAYOUT_ID, announcement), "announcement_id")


_INFERENCE_REQUESTS = request_bounds(MODEL_LEN)
_STORE_CONVERSIONS: Mapping[str, Callable[[Any], object]] = {
    "RegisterAdapter": store_convert.from_registration,
    "UploadAdapter": lambda request: run_now(_upload(request)),
    "GetAdapter": lambda request: store_convert.from_ref(request, DEFAULT_TENANT),
    "ListAdapters": lambda request: parse_filter(request.filter),
    "ListVersions": lambda request: store_convert.from_name(request, DEFAULT_TENANT),
    "GetText": store_convert.from_text_request,
    "ExportAdapter": lambda request: store_convert.from_ref(request, DEFAULT_TENANT),
    "PinAdapter": lambda request: store_convert.from_ref(request, DEFAULT_TENANT),
    "UnpinAdapter": lambda request: store_convert.from_ref(request, DEFAULT_TENANT),
    "DeleteAdapter": lambda request: store_convert.from_name(request, DEFAULT_TENANT),
    "RollbackAdapter": store_convert.from_rollback,
    "PruneVersions": store_convert.from_prune,
    "RegisterLayout": _register_layout,
    "ListLayouts": store_convert.from_layout_page,
    "ForgetLayout": store_convert.from_forget_layout,
    "PullAdapter": store_convert.from_pull,
    "WatchAdapters": store_convert.from_watch,
}
_INFERENCE_CONVERSIONS: Mapping[str, Callable[[Any], object]] = {
    "Generate": lambda request: requests_of(
        inference_convert.from_generate_request(request, VOCABULARY)
    ),
    "UploadImage": lambda request: run_now(_upload_image(request)),
    "Embed": lambda request: requests_of(from_embed_request(request, rule=RULE)),
    "Classify": lambda request: requests_of(from_classify_request(request, rule=LABELS)),
    "Score": lambda request: [_scored(request, facts) for facts in (GENERATES, CROSS_ENCODER)],
    "Tokenize": lambda request: from_tokenize_request(request),
    "Detokenize": lambda request: tuple(request.token_ids),
    "InspectAdapter": lambda request: parse_ref(request.ref),
    "LoadAdapter": lambda request: parse_ref(request.ref),
    "UnloadAdapter": lambda request: parse_ref(request.ref),
    "PinAdapter": lambda request: parse_ref(request.ref),
    "UnpinAdapter": lambda request: parse_ref(request.ref),
    "PauseGeneration": inference_convert.from_pause_request,
    "ProfileSteps": inference_convert.from_profile_request,
}


# --- from a call to the engine's requests -------------------------------------------------------


def _scored(request: Any, facts: Any) -> Sequence[Request]:
    """Returns the engine's requests on a server with these facts; none if it refuses the call."""
    try:
        return requests_of(from_score_request(request, facts=facts))
    except InvalidArgument:
        return ()


def requests_of(call: GenerateCall) -> Sequence[Request]:
    """Returns the engine's requests of a call. Raises InvalidArgument.

    All adapters exist; some add tokens, and some are active only after their invocation tokens.
    """
    binding = _bind(call)
    requests: list[Request] = []
    for index, prompt in enumerate(call.prompts):
        requests += call.to_requests(
            index,
            Encoded(_tokens_of(prompt)),
            binding,
            "default",
            MODEL_LEN,
            end_ids=(5,) if binding is not None else (),
            vocab_size=VOCABULARY,
        )
    call.check_stops(requests, EOS_TOKEN_IDS)
    requests = call.bounded(requests)
    assert len(requests) <= MAX_CHOICES * max(1, len(call.prompts))
    for request in requests:
        _check_request(request)
    return requests


def _bind(call: GenerateCall) -> Binding | None:
    if call.parts:
        assert len(call.parts) <= MAX_PARTS
        assert all(abs(scale) <= MAX_PART_SCALE for _, scale in call.parts)
        parts = [
            (Binding(ref, "default", f"{DIGEST[:-2]}{index:02}", 4), scale)
            for index, (ref, scale) in enumerate(call.parts)
        ]
        return Binding.of_parts(parts)
    if not call.adapter:
        return None
    invocation = INVOCATION_TOKENS if len(call.adapter) % 2 else ()
    return Binding(
        call.adapter,
        "default",
        DIGEST,
        4,
        added_tokens=ADDED_TOKENS,
        invocation_tokens=invocation,
    )


def _tokens_of(prompt: Prompt) -> tuple[int, ...]:
    """Returns a prompt's tokens, which are the bytes of a text. Raises InvalidArgument as the
    encoder does."""
    if isinstance(prompt, Question):
        prompt = prompt.chat
    if isinstance(prompt, Text):
        ids: tuple[int, ...] = tuple(prompt.text.encode())
    elif isinstance(prompt, Pair):
        ids = tuple(f"{prompt.first} {prompt.second}".encode())
    elif isinstance(prompt, Chat):
        assert not (prompt.add_generation_prompt and prompt.continue_final_message)
        ids = tuple("".join(f"{each.role} {each.content}" for each in prompt.messages).encode())
    else:
        ids = prompt
    if not ids or len(ids) >= MODEL_LEN or max(ids) >= VOCABULARY + ADDED_TOKENS:
        raise InvalidArgument("prompt: is empty, too long, or has an unknown id", subject="prompt")
    return ids


def _check_request(request: Request) -> None:
    """Checks the values that the engine relies on."""
    sampling = request.sampling
    assert 0 <= sampling.min_tokens <= sampling.max_tokens <= MODEL_LEN
    numbers = (
        *(sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty),
        *(sampling.presence_penalty, sampling.frequency_penalty),
    )
    assert all(map(math.isfinite, numbers))
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.top_k < VOCABULARY
    assert 0 <= sampling.seed < 1 << 64
    for option in (request.wanted.get(LogprobsOption), request.wanted.get(ScoresOption)):
        assert option is None or 0 <= option.top_k <= MAX_LOGPROBS
    assert len(sampling.stop_token_ids) <= MAX_STOP_TOKEN_IDS + 1
    assert all(0 <= each < request.vocab_size for each in sampling.stop_token_ids)
    for text in (request.request_id, request.adapter, request.cache_seed, *sampling.stop):
        text.encode()
