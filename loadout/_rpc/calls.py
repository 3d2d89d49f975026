"""One function per RPC: its request, the conversion of its response, whether it may be repeated.

Both clients are thin layers over these functions. They raise InvalidArgument for arguments that do
not fit into a request, before anything is sent.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast, get_type_hints

from google.protobuf.message import Message

from loadout import types
from loadout._rpc.convert import from_inference, from_store
from loadout._rpc.convert.messages import build, invalid, named
from loadout._rpc.convert.to_chat import CHAT_NAMES, ImageFiles, Prompt, to_prompt
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.errors import InvalidArgument
from loadout.inference.v1 import inference_pb2 as inference_pb

T = TypeVar("T")

Adapters = Sequence[str | tuple[str, float]]
"""Adapters that a request sums: references, or pairs of reference and scale."""

IMAGE_CHUNK_BYTES = 512 << 10

SAMPLING_NAMES = tuple(get_type_hints(types.SamplingParams))
STRUCTURE_NAMES = tuple(get_type_hints(types.Structure))


class Service(enum.Enum):
    STORE = "store"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One unary RPC. `repeatable`: executing it twice does no more than executing it once.

    `adapter` is the reference by which a replica of the inference service is chosen. `images` are
    the files that it names by their hashes.
    """

    service: Service
    rpc: str
    request: Message
    convert: Callable[[Any], T]
    repeatable: bool = True
    adapter: str = ""
    images: ImageFiles | None = None
    may_spill: ClassVar[bool] = False
    """Operations on an adapter go to the replica that its requests go to first."""


@dataclass(frozen=True, slots=True)
class StreamCall(Generic[T]):
    """One RPC with a stream of responses.

    `resume(last)` is the request that continues after the last item (None: there was none yet), or
    None if the stream cannot be continued. `adapter` is the reference by which a replica of the
    inference service is chosen. A complete stream has `num_items`, if that is known. `images` are
    as in Call.
    """

    service: Service
    rpc: str
    request: Message
    convert: Callable[[Any], T]
    resume: Callable[[T | None], Message | None]
    adapter: str = ""
    num_items: int = 0
    images: ImageFiles | None = None
    may_spill: ClassVar[bool] = True
    """Another replica takes requests for which the adapter's own has no capacity."""


def signature_message(signature: types.Signature | None) -> Message | None:
    if signature is None:
        return None
    return cast(
        Message,
        build(store_pb.Signature, "signature", key_id=signature.key_id, value=signature.value),
    )


def check_upload(ephemeral: bool) -> None:
    """Raises InvalidArgument if a source that the store fetches is to be ephemeral."""
    if ephemeral:
        raise InvalidArgument(
            "ephemeral: only an upload can be ephemeral: give a local folder, or use push",
            code="INVALID_ARGUMENT",
            subject="ephemeral",
        )


def ttl_seconds(ttl_s: float | None) -> int:
    """Returns a time to live as the store takes it, 0 for none. Raises InvalidArgument."""
    if ttl_s is None:
        return 0
    if not 0 < ttl_s < 2**32 - 1:
        raise InvalidArgument(
            f"ttl: {ttl_s} is not a number of seconds above 0; None means never",
            code="INVALID_ARGUMENT",
            subject="ttl",
        )
    return math.ceil(ttl_s)


# --- the adapter store --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """The record of an adapter that is to be made, wherever its files come from."""

    name: str
    base_model: str = ""
    expected_digest: str = ""
    if_current_digest: str = ""
    pinned: bool = False
    labels: Mapping[str, str] | None = None
    description: str = ""
    signature: types.Signature | None = None
    keep: int = 0
    ttl_s: float | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a message that records it. Raises InvalidArgument."""
        return {
            "name": self.name,
            "base_model": self.base_model,
            "expected_digest": self.expected_digest,
            "if_current_digest": self.if_current_digest,
            "pinned": self.pinned,
            "labels": dict(self.labels or {}),
            "description": self.description,
            "signature": signature_message(self.signature),
            "keep": self.keep,
            "ttl_seconds": ttl_seconds(self.ttl_s),
        }


def upload_meta(new: NewAdapter, *, ephemeral: bool) -> store_pb.UploadMeta:
    """Returns the first message of an upload. Raises InvalidArgument, naming the field."""
    meta: store_pb.UploadMeta = build(store_pb.UploadMeta, **new.fields(), ephemeral=ephemeral)
    return meta


def register(new: NewAdapter, source_uri: str) -> Call[types.Registration]:
    request = build(store_pb.RegisterAdapterRequest, **new.fields(), source_uri=source_uri)
    # A second attempt of a conditional registration would conflict with its own first one.
    return Call(
        Service.STORE,
        "RegisterAdapter",
        request,
        from_store.registration,
        repeatable=not new.if_current_digest,
    )


def get(ref: str) -> Call[types.Adapter]:
    request = build(store_pb.GetAdapterRequest, ref=ref)
    return Call(Service.STORE, "GetAdapter", request, from_store.only_adapter)


def list_page(page_size: int, page_token: str, filter: str) -> Call[types.AdapterPage]:  # noqa: A002
    request = build(
        store_pb.ListAdaptersRequest, page_size=page_size, page_token=page_token, filter=filter
    )
    return Call(Service.STORE, "ListAdapters", request, from_store.adapter_page)


def delete(name: str, version: int) -> Call[int]:
    request = build(store_pb.DeleteAdapterRequest, name=name, version=version)
    # Repeated, it could delete a version that somebody registered in between.
    return Call(Service.STORE, "DeleteAdapter", request, from_store.revision, repeatable=False)


def version_page(name: str, page_size: int, page_token: str) -> Call[types.VersionPage]:
    request = build(
        store_pb.ListVersionsRequest, name=name, page_size=page_size, page_token=page_token
    )
    return Call(Service.STORE, "ListVersions", request, from_store.version_page)


def rollback(name: str, version: int, if_current_digest: str) -> Call[types.Registration]:
    request = build(
        store_pb.RollbackAdapterRequest,
        name=name,
        version=version,
        if_current_digest=if_current_digest,
    )
    # As for a registration: a second attempt would conflict with its own first one.
    return Call(
        Service.STORE,
        "RollbackAdapter",
        request,
        from_store.rollback,
        repeatable=not if_current_digest,
    )


def prune(name: str, keep: int) -> Call[types.PrunedPage]:
    request = build(store_pb.PruneVersionsRequest, name=name, keep=keep)
    return Call(Service.STORE, "PruneVersions", request, from_store.pruned_page)


def pin(ref: str) -> Call[types.Adapter]:
    request = build(store_pb.PinAdapterRequest, ref=ref)
    return Call(Service.STORE, "PinAdapter", request, from_store.only_adapter)


def unpin(ref: str) -> Call[types.Adapter]:
    request = build(store_pb.UnpinAdapterRequest, ref=ref)
    return Call(Service.STORE, "UnpinAdapter", request, from_store.only_adapter)


def watch(since_revision: int) -> StreamCall[types.AdapterEvent]:
    def resume(last: types.AdapterEvent | None) -> Message:
        return store_pb.WatchAdaptersRequest(since_revision=last.revision) if last else request

    request = build(store_pb.WatchAdaptersRequest, since_revision=since_revision)
    return StreamCall(Service.STORE, "WatchAdapters", request, from_store.event, resume)


def layout_page(page_token: str) -> Call[types.LayoutPage]:
    request = build(store_pb.ListLayoutsRequest, page_token=page_token)
    return Call(Service.STORE, "ListLayouts", request, from_store.layout_page)


def forget_layout(layout_id: str) -> Call[int]:
    request = build(store_pb.ForgetLayoutRequest, layout_id=layout_id)
    # Repeated, it would not find the layout that it has forgotten.
    return Call(Service.STORE, "ForgetLayout", request, from_store.num_images, repeatable=False)


def store_status() -> Call[types.StoreStatus]:
    request = store_pb.GetStoreStatusRequest()
    return Call(Service.STORE, "GetStoreStatus", request, from_store.store_status)


# --- the inference service ----------------------------------------------------------------------


def generate(
    prompt: Prompt,
    adapter: str | None,
    min_revision: int,
    request_id: str,
    priority: int,
    cache_salt: str,
    options: Mapping[str, Any],
    adapters: Adapters = (),
    return_routed_experts: bool = False,
    echo: bool = False,
    packed_logprobs: bool = False,
    n: int = 1,
    version_policy: types.VersionPolicy = "pin",
    add_special_tokens: bool | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> StreamCall[types.Chunk]:
    parts = [part if isinstance(part, tuple) else (part, 1.0) for part in adapters]
    request = build(
        inference_pb.GenerateRequest,
        adapter=adapter or "",
        adapters=[build(inference_pb.AdapterPart, ref=ref, scale=scale) for ref, scale in parts],
        min_revision=min_revision,
        request_id=request_id,
        priority=priority,
        cache_salt=cache_salt,
        sampling=_sampling({k: v for k, v in options.items() if k not in CHAT_NAMES}),
        return_routed_experts=return_routed_experts,
        echo=echo,
        packed_logprobs=packed_logprobs,
        n=0 if n == 1 else n,
        version_policy=named(from_inference.VERSION_POLICIES, version_policy, "version_policy"),
        add_special_tokens=add_special_tokens,
        **to_prompt(prompt, add_generation_prompt, continue_final_message, options),
    )
    # A generation cannot be continued elsewhere: only an unanswered request is sent again.
    return StreamCall(
        Service.INFERENCE,
        "Generate",
        request,
        from_inference.chunk,
        lambda last: request if last is None else None,
        # A sum goes where its first adapter does.
        adapter=adapter or next((ref for ref, _ in parts), ""),
        images=ImageFiles.of(prompt, cache_salt),
    )


def upload_image(size: int, adapter: str, cache_salt: str) -> Call[bytes]:
    """Returns an upload of a file, whose request is the first of `image_messages`."""
    upload = build(inference_pb.ImageUpload, "upload", size_bytes=size, cache_salt=cache_salt)
    request = inference_pb.UploadImageRequest(upload=upload)
    return Call(
        Service.INFERENCE, "UploadImage", request, lambda response: response.sha256, adapter=adapter
    )


def image_messages(upload: Message, data: bytes) -> Iterator[Message]:
    """Yields the messages of an upload."""
    yield upload
    for start in range(0, len(data), IMAGE_CHUNK_BYTES):
        yield inference_pb.UploadImageRequest(chunk=data[start : start + IMAGE_CHUNK_BYTES])


def _sampling(values: Mapping[str, Any]) -> inference_pb.SamplingParams:
    unknown = sorted(set(values) - set(SAMPLING_NAMES))
    if unknown:
        raise TypeError(
            f"unknown argument {unknown[0]!r}; sampling has {', '.join(SAMPLING_NAMES)}, and "
            f"a chat {', '.join(CHAT_NAMES)}"
        )
    given = {name: value for name, value in values.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "logprobs_mode" in given:
        given["logprobs_mode"] = named(
            from_inference.LOGPROBS_MODES, given["logprobs_mode"], "sampling.logprobs_mode"
        )
    if "structure" in given:
        given["structure"] = _structure(given["structure"])
    return cast(
        inference_pb.SamplingParams, build(inference_pb.SamplingParams, "sampling", **given)
    )


def _structure(values: Mapping[str, Any]) -> Message:
    field = "sampling.structure"
    if len(values) != 1 or not values.keys() <= set(STRUCTURE_NAMES):
        raise invalid(field, f"must have one of {', '.join(STRUCTURE_NAMES)}")
    given = dict(values)
    if isinstance(given.get("choice"), str):  # a sequence of texts, too: its letters
        raise invalid(f"{field}.choice", "must be a list of texts, not one text")
    schema = given.get("json_schema")
    if schema is not None and not isinstance(schema, str):
        given["json_schema"] = json.dumps(schema)
    if "choice" in given:
        given["choice"] = build(inference_pb.Structure.Choices, field, texts=given["choice"])
    return cast(Message, build(inference_pb.Structure, field, **given))


def load(ref: str, pin: bool, min_revision: int = 0) -> Call[types.ResidentAdapter]:
    request = build(inference_pb.LoadAdapterRequest, ref=ref, pin=pin, min_revision=min_revision)
    return Call(
        Service.INFERENCE, "LoadAdapter", request, from_inference.only_resident, adapter=ref
    )


def pause(mode: str, resume_after_s: float | None) -> Call[int]:
    request = build(
        inference_pb.PauseGenerationRequest,
        mode=named(from_inference.PAUSE_MODES, mode, "mode"),
        resume_after_seconds=resume_after_s,
    )
    return Call(Service.INFERENCE, "PauseGeneration", request, from_inference.held_requests)


def resume() -> Call[None]:
    request = inference_pb.ResumeGenerationRequest()
    return Call(Service.INFERENCE, "ResumeGeneration", request, lambda response: None)


def sleep(weights: bool) -> Call[int]:
    request = build(inference_pb.SleepRequest, free_weights=weights)
    return Call(Service.INFERENCE, "Sleep", request, from_inference.freed_bytes)


def wake() -> Call[float]:
    return Call(Service.INFERENCE, "Wake", inference_pb.WakeRequest(), from_inference.wake_seconds)


def unload(ref: str) -> Call[int]:
    request = build(inference_pb.UnloadAdapterRequest, ref=ref)
    # A second execution would find nothing to free, and report that.
    return Call(
        Service.INFERENCE,
        "UnloadAdapter",
        request,
        from_inference.freed_bytes,
        repeatable=False,
        adapter=ref,
    )


def pin_resident(ref: str) -> Call[types.ResidentAdapter]:
    request = build(inference_pb.PinAdapterRequest, ref=ref)
    return Call(Service.INFERENCE, "PinAdapter", request, from_inference.only_resident, adapter=ref)


def unpin_resident(ref: str) -> Call[types.ResidentAdapter]:
    request = build(inference_pb.UnpinAdapterRequest, ref=ref)
    return Call(
        Service.INFERENCE, "UnpinAdapter", request, from_inference.only_resident, adapter=ref
    )


def tokenize(
    prompt: Prompt,
    adapter: str,
    options: Mapping[str, Any],
    add_special_tokens: bool | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    cache_salt: str = "",
) -> Call[tuple[int, ...]]:
    unknown = sorted(set(options) - set(CHAT_NAMES))
    if unknown:
        raise TypeError(f"unknown argument {unknown[0]!r}; a chat has {', '.join(CHAT_NAMES)}")
    fields = to_prompt(prompt, add_generation_prompt, continue_final_message, options)
    if "token_ids" in fields:
        raise invalid("prompt", "must be a text or chat messages, not tokens")
    request = build(
        inference_pb.TokenizeRequest,
        adapter=adapter,
        add_special_tokens=add_special_tokens,
        cache_salt=cache_salt,
        **fields,
    )
    return Call(
        Service.INFERENCE,
        "Tokenize",
        request,
        from_inference.token_ids,
        adapter=adapter,
        images=ImageFiles.of(prompt, cache_salt),
    )


def detokenize(token_ids: Sequence[int], adapter: str) -> Call[str]:
    request = build(inference_pb.DetokenizeRequest, adapter=adapter, token_ids=token_ids)
    return Call(Service.INFERENCE, "Detokenize", request, from_inference.text, adapter=adapter)


def residents(limit: int) -> Call[tuple[types.ResidentAdapter, ...]]:
    request = build(inference_pb.ListResidentAdaptersRequest, limit=limit)
    return Call(Service.INFERENCE, "ListResidentAdapters", request, from_inference.residents)


def inspect(ref: str) -> Call[types.InspectedAdapter]:
    request = build(inference_pb.InspectAdapterRequest, ref=ref)
    return Call(Service.INFERENCE, "InspectAdapter", request, from_inference.inspected, adapter=ref)


def server_info() -> Call[types.ServerInfo]:
    request = inference_pb.GetServerInfoRequest()
    return Call(Service.INFERENCE, "GetServerInfo", request, from_inference.server_info)


# --- for operators of both ----------------------------------------------------------------------


def only_unanswered(request: Message) -> Callable[[Any | None], Message | None]:
    """Repeats a request only while nothing was received: it cannot be continued."""
    return lambda last: request if last is None else None


def export(ref: str) -> StreamCall[Any]:
    request = build(store_pb.ExportAdapterRequest, ref=ref)
    resume = only_unanswered(request)
    return StreamCall(Service.STORE, "ExportAdapter", request, lambda message: message, resume)


def store_debug_info() -> StreamCall[types.DebugPart]:
    request = store_pb.GetDebugInfoRequest()
    resume = only_unanswered(request)
    return StreamCall(Service.STORE, "GetDebugInfo", request, from_inference.debug_part, resume)


def server_debug_info() -> StreamCall[types.DebugPart]:
    request = inference_pb.GetDebugInfoRequest()
    resume = only_unanswered(request)
    return StreamCall(Service.INFERENCE, "GetDebugInfo", request, from_inference.debug_part, resume)


def profile(num_steps: int, wait_s: float | None, rank: int = 0) -> StreamCall[types.TracePiece]:
    request = build(
        inference_pb.ProfileStepsRequest, num_steps=num_steps, timeout_seconds=wait_s, rank=rank
    )
    resume = only_unanswered(request)
    return StreamCall(
        Service.INFERENCE, "ProfileSteps", request, from_inference.trace_piece, resume
    )
