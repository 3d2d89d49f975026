"""The contract's messages as the client's types: pure functions, one per message."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from google.protobuf.timestamp_pb2 import Timestamp

from loadout import types
from loadout._rpc import results
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as inference_pb

IMAGE_STATES = {
    store_pb.IMAGE_STATE_PENDING: types.ImageState.PENDING,
    store_pb.IMAGE_STATE_COMPILING: types.ImageState.COMPILING,
    store_pb.IMAGE_STATE_READY: types.ImageState.READY,
    store_pb.IMAGE_STATE_INCOMPATIBLE: types.ImageState.INCOMPATIBLE,
}
SEGMENT_KINDS = {
    store_pb.SEGMENT_KIND_A: types.SegmentKind.A,
    store_pb.SEGMENT_KIND_B: types.SegmentKind.B,
    store_pb.SEGMENT_KIND_BIAS: types.SegmentKind.BIAS,
    store_pb.SEGMENT_KIND_MAGNITUDE: types.SegmentKind.MAGNITUDE,
    store_pb.SEGMENT_KIND_ROW_IDS: types.SegmentKind.ROW_IDS,
    store_pb.SEGMENT_KIND_ROWS: types.SegmentKind.ROWS,
    store_pb.SEGMENT_KIND_FULL: types.SegmentKind.FULL,
}
RESIDENT_SEGMENT_KINDS = {
    inference_pb.SEGMENT_KIND_A: types.SegmentKind.A,
    inference_pb.SEGMENT_KIND_B: types.SegmentKind.B,
    inference_pb.SEGMENT_KIND_BIAS: types.SegmentKind.BIAS,
    inference_pb.SEGMENT_KIND_MAGNITUDE: types.SegmentKind.MAGNITUDE,
    inference_pb.SEGMENT_KIND_ROW_IDS: types.SegmentKind.ROW_IDS,
    inference_pb.SEGMENT_KIND_ROWS: types.SegmentKind.ROWS,
    inference_pb.SEGMENT_KIND_FULL: types.SegmentKind.FULL,
}
TARGET_KINDS = {
    inference_pb.TARGET_KIND_LINEAR: types.TargetKind.LINEAR,
    inference_pb.TARGET_KIND_EMBEDDING: types.TargetKind.EMBEDDING,
    inference_pb.TARGET_KIND_EXPERTS: types.TargetKind.EXPERTS,
    inference_pb.TARGET_KIND_VECTOR: types.TargetKind.VECTOR,
}
BASE_MODEL_SOURCES = {
    store_pb.BASE_MODEL_SOURCE_CALLER: types.BaseModelSource.CALLER,
    store_pb.BASE_MODEL_SOURCE_CURRENT_VERSION: types.BaseModelSource.CURRENT_VERSION,
    store_pb.BASE_MODEL_SOURCE_SERVED: types.BaseModelSource.SERVED,
    store_pb.BASE_MODEL_SOURCE_CONFIG: types.BaseModelSource.CONFIG,
    store_pb.BASE_MODEL_SOURCE_DEFAULT: types.BaseModelSource.DEFAULT,
    store_pb.BASE_MODEL_SOURCE_ONLY_SERVED: types.BaseModelSource.ONLY_SERVED,
}
EVENT_KINDS = {
    store_pb.EVENT_KIND_REGISTERED: types.EventKind.REGISTERED,
    store_pb.EVENT_KIND_UPDATED: types.EventKind.UPDATED,
    store_pb.EVENT_KIND_DELETED: types.EventKind.DELETED,
    store_pb.EVENT_KIND_PINNED: types.EventKind.PINNED,
    store_pb.EVENT_KIND_UNPINNED: types.EventKind.UNPINNED,
    store_pb.EVENT_KIND_BOOKMARK: types.EventKind.BOOKMARK,
}
FINISH_REASONS = {
    inference_pb.FINISH_REASON_STOP: types.FinishReason.STOP,
    inference_pb.FINISH_REASON_LENGTH: types.FinishReason.LENGTH,
    inference_pb.FINISH_REASON_ABORTED: types.FinishReason.ABORTED,
}
LOGPROBS_MODES: dict[int, Literal["raw", "processed"]] = {
    inference_pb.LOGPROBS_MODE_RAW: "raw",
    inference_pb.LOGPROBS_MODE_PROCESSED: "processed",
}
VERSION_POLICIES: dict[int, types.VersionPolicy] = {
    inference_pb.VERSION_POLICY_UNSPECIFIED: "pin",
    inference_pb.VERSION_POLICY_FOLLOW_KEEP: "follow_keep",
    inference_pb.VERSION_POLICY_FOLLOW_RECOMPUTE: "follow_recompute",
}
PAUSE_MODES: dict[int, str] = {
    inference_pb.PAUSE_MODE_KEEP: "keep",
    inference_pb.PAUSE_MODE_WAIT: "wait",
    inference_pb.PAUSE_MODE_ABORT: "abort",
}
GENERATION_STATES: dict[int, types.GenerationState] = {
    inference_pb.GENERATION_STATE_RUNNING: "running",
    inference_pb.GENERATION_STATE_PAUSED: "paused",
    inference_pb.GENERATION_STATE_ASLEEP: "asleep",
}
TIERS = {
    inference_pb.ADAPTER_TIER_DEVICE: types.AdapterTier.DEVICE,
    inference_pb.ADAPTER_TIER_HOST: types.AdapterTier.HOST,
}


def _time(stamp: Timestamp) -> datetime | None:
    return stamp.ToDatetime(tzinfo=UTC) if stamp.seconds or stamp.nanos else None


# --- the adapter store --------------------------------------------------------------------------


def adapter(message: store_pb.Adapter) -> types.Adapter:
    return types.Adapter(
        name=message.name,
        version=message.version,
        digest=message.digest,
        source_uri=message.source_uri,
        base_model=message.base_model,
        rank=message.rank,
        targets=tuple(message.targets),
        source_bytes=message.source_bytes,
        labels=dict(message.labels),
        create_time=_time(message.create_time),
        update_time=_time(message.update_time),
        pinned=message.pinned,
        layout_states=tuple(_layout_state(state) for state in message.layout_states),
        description=message.description,
        created_by=message.created_by,
        source_revision=message.source_revision,
        config_base_model=message.config_base_model,
        files=tuple(
            types.SourceFile(file.name, file.size_bytes, file.sha256) for file in message.files
        ),
        signed_by=message.signed_by,
        delete_time=_time(message.delete_time),
        segment_kinds=tuple(
            SEGMENT_KINDS.get(kind, types.SegmentKind.UNKNOWN) for kind in message.segment_kinds
        ),
        added_tokens=message.added_tokens,
        invocation_tokens=tuple(message.invocation_tokens),
        tokenizer_digest=message.tokenizer_digest,
        chat_template_digest=message.chat_template_digest,
        ephemeral=message.ephemeral,
        expire_time=_time(message.expire_time),
    )


def _layout_state(message: store_pb.LayoutState) -> types.LayoutState:
    return types.LayoutState(
        layout_id=message.layout_id,
        state=IMAGE_STATES.get(message.state, types.ImageState.UNKNOWN),
        reason=message.reason,
        image_bytes=message.image_bytes,
        servers=tuple(
            types.ServerVerdict(each.announcement_id, each.max_rank, each.servable, each.reason)
            for each in message.servers
        ),
        fits=message.fits,
        unused_spaces=tuple(message.unused_spaces),
    )


def layout_page(message: store_pb.ListLayoutsResponse) -> types.LayoutPage:
    return types.LayoutPage(tuple(map(_layout, message.layouts)), message.next_page_token)


def _layout(message: store_pb.LayoutInfo) -> types.Layout:
    return types.Layout(
        layout_id=message.layout_id,
        base_model=message.base_model,
        other_base_models=tuple(message.other_base_models),
        aliases=tuple(message.aliases),
        max_ranks=tuple(message.max_ranks),
        images=message.images,
        image_bytes=message.image_bytes,
        create_time=_time(message.create_time),
        last_use_time=_time(message.last_use_time),
    )


def num_images(message: store_pb.ForgetLayoutResponse) -> int:
    return message.images


def only_adapter(
    message: store_pb.GetAdapterResponse
    | store_pb.PinAdapterResponse
    | store_pb.UnpinAdapterResponse,
) -> types.Adapter:
    return adapter(message.adapter)


def registration(
    message: store_pb.RegisterAdapterResponse | store_pb.UploadAdapterResponse,
) -> types.Registration:
    source = BASE_MODEL_SOURCES.get(message.base_model_source, types.BaseModelSource.UNKNOWN)
    return types.Registration(
        *(adapter(message.adapter), message.revision, tuple(message.deleted_versions)),
        *(source, message.base_model_reason, tuple(message.ignored_config_keys)),
        warnings=tuple(message.warnings),
    )


def rollback(message: store_pb.RollbackAdapterResponse) -> types.Registration:
    return types.Registration(adapter(message.adapter), message.revision)


def pruned_page(message: store_pb.PruneVersionsResponse) -> types.PrunedPage:
    return types.PrunedPage(tuple(message.deleted_versions), message.revision, message.has_more)


def adapter_page(message: store_pb.ListAdaptersResponse) -> types.AdapterPage:
    adapters = tuple(adapter(each) for each in message.adapters)
    return types.AdapterPage(adapters, message.next_page_token, message.revision)


def version_page(message: store_pb.ListVersionsResponse) -> types.VersionPage:
    adapters = tuple(adapter(each) for each in message.adapters)
    return types.VersionPage(
        adapters, message.next_page_token, message.current_version, message.revision
    )


def revision(message: store_pb.DeleteAdapterResponse) -> int:
    return message.revision


def event(message: store_pb.WatchAdaptersResponse) -> types.AdapterEvent:
    return types.AdapterEvent(
        revision=message.event.revision,
        kind=EVENT_KINDS.get(message.event.kind, types.EventKind.UNKNOWN),
        name=message.event.name,
        version=message.event.version,
        digest=message.event.digest,
        time=_time(message.event.time),
    )


def store_status(message: store_pb.GetStoreStatusResponse) -> types.StoreStatus:
    return types.StoreStatus(
        version=message.version,
        revision=message.revision,
        adapters=message.adapters,
        layouts=message.layouts,
        memory=_tier_status(message.memory),
        disk=_tier_status(message.disk),
        blob_bytes=message.blob_bytes,
        active_pulls=message.active_pulls,
    )


def _tier_status(message: store_pb.TierStatus) -> types.TierStatus:
    return types.TierStatus(
        used_bytes=message.used_bytes,
        capacity_bytes=message.capacity_bytes,
        images=message.images,
        hits=message.hits,
        misses=message.misses,
        evictions=message.evictions,
    )


# --- the inference service ----------------------------------------------------------------------


def chunk(message: inference_pb.GenerateResponse) -> types.Chunk:
    return types.Chunk(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=(
            FINISH_REASONS.get(message.finish_reason, types.FinishReason.UNKNOWN)
            if message.finish_reason
            else None
        ),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        adapter=_identity(message.adapter) if message.HasField("adapter") else None,
        timings=_timings(message.timings) if message.HasField("timings") else None,
        adapters=tuple(_identity(each) for each in message.adapters),
        kept_tokens=message.kept_tokens,
        index=message.index,
        echoed_tokens=message.echoed_tokens,
        **results.of_response(message),
    )


def _usage(message: inference_pb.Usage) -> types.Usage:
    return types.Usage(
        message.prompt_tokens, message.cached_prompt_tokens, message.completion_tokens
    )


def _identity(message: inference_pb.AdapterIdentity) -> types.AdapterIdentity:
    scale = message.scale if message.HasField("scale") else None
    return types.AdapterIdentity(message.name, message.digest, message.is_inactive, scale)


def _timings(message: inference_pb.Timings) -> types.Timings:
    return types.Timings(
        message.queued_seconds, message.adapter_wait_seconds, message.first_token_seconds
    )


def completion(chunks: Iterable[types.Chunk]) -> types.Completion | None:
    """Joins a generation's chunks; None if the last one is missing."""
    pieces = list(chunks)
    last = pieces[-1] if pieces else None
    if last is None or last.finish_reason is None:
        return None
    return types.Completion(
        request_id=last.request_id,
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        text="".join(piece.text for piece in pieces),
        finish_reason=last.finish_reason,
        usage=last.usage,
        adapter=next((piece.adapter for piece in pieces if piece.adapter), None),
        versions=_versions(pieces),
        timings=last.timings,
        adapters=last.adapters,
        **results.joined(pieces),
    )


def _versions(pieces: Iterable[types.Chunk]) -> tuple[tuple[types.AdapterIdentity, int], ...]:
    found: list[tuple[types.AdapterIdentity, int]] = []
    for piece in pieces:
        adapter, num_tokens = piece.adapter, len(piece.token_ids) - piece.echoed_tokens
        if adapter is None or not num_tokens:
            continue
        if found and found[-1][0] == adapter:
            num_tokens += found.pop()[1]
        found.append((adapter, num_tokens))
    return tuple(found)


def completions(chunks: Iterable[types.Chunk], count: int) -> tuple[types.Completion, ...] | None:
    """Joins the chunks of so many answers; None if a last one is missing."""
    pieces = list(chunks)
    found = [
        completion(piece for piece in pieces if piece.index == index) for index in range(count)
    ]
    return None if None in found else tuple(each for each in found if each is not None)


def resident(message: inference_pb.ResidentAdapter) -> types.ResidentAdapter:
    return types.ResidentAdapter(
        digest=message.digest,
        names=tuple(message.names),
        tier=TIERS.get(message.tier, types.AdapterTier.UNKNOWN),
        num_bytes=message.bytes,
        rank=message.rank,
        pinned=message.pinned,
        running_requests=message.running_requests,
        last_used_time=_time(message.last_used_time),
        load_seconds=message.load_seconds,
        superseded=message.superseded,
        not_finite_requests=message.not_finite_requests,
    )


def only_resident(
    message: inference_pb.LoadAdapterResponse
    | inference_pb.PinAdapterResponse
    | inference_pb.UnpinAdapterResponse,
) -> types.ResidentAdapter:
    return resident(message.adapter)


def residents(
    message: inference_pb.ListResidentAdaptersResponse,
) -> tuple[types.ResidentAdapter, ...]:
    return tuple(resident(each) for each in message.adapters)


def inspected(message: inference_pb.InspectAdapterResponse) -> types.InspectedAdapter:
    targets = tuple(_resident_target(each) for each in message.targets)
    groups = tuple(
        types.OperationGroup(
            each.name, tuple(targets[index].name for index in each.targets), each.launches
        )
        for each in message.groups
    )
    extents = tuple(types.ResidentExtent(each.offset, each.bytes) for each in message.extents)
    return types.InspectedAdapter(
        *(resident(message.adapter), message.slot, extents, targets, groups),
        *(message.launches, message.kernels),
    )


def _resident_target(message: inference_pb.ResidentTarget) -> types.ResidentTarget:
    segments = tuple(
        types.ResidentSegment(
            RESIDENT_SEGMENT_KINDS.get(each.kind, types.SegmentKind.UNKNOWN),
            each.bytes,
            each.offset,
        )
        for each in message.segments
    )
    return types.ResidentTarget(
        message.name,
        message.layer if message.HasField("layer") else None,
        TARGET_KINDS.get(message.kind, types.TargetKind.UNKNOWN),
        message.rank,
        segments,
    )


def freed_bytes(message: inference_pb.UnloadAdapterResponse | inference_pb.SleepResponse) -> int:
    return message.freed_bytes


def held_requests(message: inference_pb.PauseGenerationResponse) -> int:
    return message.held_requests


def wake_seconds(message: inference_pb.WakeResponse) -> float:
    return message.seconds


def server_info(message: inference_pb.GetServerInfoResponse) -> types.ServerInfo:
    limits = message.limits
    return types.ServerInfo(
        base_model=message.base_model,
        architecture=message.architecture,
        dtype=message.dtype,
        device=message.device,
        layout_id=message.layout_id,
        limits=types.ServerLimits(
            max_model_len=limits.max_model_len,
            max_loras=limits.max_loras,
            max_lora_rank=limits.max_lora_rank,
            max_sequences=limits.max_sequences,
            max_batch_tokens=limits.max_batch_tokens,
            max_queue=limits.max_queue,
            memory_bytes=limits.memory_bytes,
            lora_targets=tuple(limits.lora_targets),
        ),
        memory=tuple(
            types.MemoryUse(use.name, use.used_bytes, use.capacity_bytes) for use in message.memory
        ),
        versions=dict(message.versions),
        kernels=message.kernels,
        machine=message.machine,
        sampling_defaults=_sampling_defaults(message),
        metrics_port=message.metrics_port,
        experts=_expert_layers(message.experts) if message.HasField("experts") else None,
        generation=GENERATION_STATES.get(message.generation),
        num_threads=message.num_threads,
        speed_notes=tuple(message.speed_notes),
    )


def _expert_layers(message: inference_pb.ExpertLayers) -> types.ExpertLayers:
    return types.ExpertLayers(tuple(message.layers), message.num_experts, message.num_chosen)


def _sampling_defaults(
    message: inference_pb.GetServerInfoResponse,
) -> types.SamplingDefaults | None:
    if not message.HasField("sampling_defaults"):
        return None
    defaults = message.sampling_defaults
    return types.SamplingDefaults(
        *(float(f"{defaults.temperature:.6g}"), defaults.top_k, float(f"{defaults.top_p:.6g}")),
        logprobs_mode=LOGPROBS_MODES.get(defaults.logprobs_mode, "raw"),
    )


# --- for operators of both ----------------------------------------------------------------------


def debug_part(
    message: store_pb.GetDebugInfoResponse | inference_pb.GetDebugInfoResponse,
) -> types.DebugPart:
    return types.DebugPart(message.name, message.content, message.error)


def trace_piece(message: inference_pb.ProfileStepsResponse) -> types.TracePiece:
    return types.TracePiece(message.chunk, message.num_steps)
