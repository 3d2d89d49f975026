"""The inference service's messages as the client's types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from contract.protobuf import SEGMENT_KINDS, TARGET_KINDS
from loadout import types
from loadout._rpc import results
from loadout._rpc.convert.from_store import time_of
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as inference_pb

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
TOOL_CHOICES: dict[int, types.ToolChoice] = {
    inference_pb.TOOL_CHOICE_UNSPECIFIED: "auto",
    inference_pb.TOOL_CHOICE_NONE: "none",
    inference_pb.TOOL_CHOICE_REQUIRED: "required",
}
TIERS = {
    inference_pb.ADAPTER_TIER_DEVICE: types.AdapterTier.DEVICE,
    inference_pb.ADAPTER_TIER_HOST: types.AdapterTier.HOST,
}


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
        usage=usage(message.usage) if message.HasField("usage") else None,
        adapter=identity(message.adapter) if message.HasField("adapter") else None,
        timings=timings(message.timings) if message.HasField("timings") else None,
        adapters=tuple(identity(each) for each in message.adapters),
        kept_tokens=message.kept_tokens,
        index=message.index,
        echoed_tokens=message.echoed_tokens,
        reasoning=message.reasoning,
        tool_calls=tuple(
            types.ToolCallPiece(each.index, each.name, each.id, each.arguments, each.error)
            for each in message.tool_calls
        ),
        **results.of_response(message),
    )


def usage(message: inference_pb.Usage) -> types.Usage:
    return types.Usage(
        message.prompt_tokens, message.cached_prompt_tokens, message.completion_tokens
    )


def identity(message: inference_pb.AdapterIdentity) -> types.AdapterIdentity:
    scale = message.scale if message.HasField("scale") else None
    return types.AdapterIdentity(message.name, message.digest, message.is_inactive, scale)


def timings(message: inference_pb.Timings) -> types.Timings:
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
        reasoning="".join(piece.reasoning for piece in pieces),
        tool_calls=_calls(pieces),
        **results.joined(pieces),
    )


def _calls(pieces: Iterable[types.Chunk]) -> tuple[types.AnsweredCall, ...]:
    found: dict[int, list[types.ToolCallPiece]] = {}
    for piece in pieces:
        for each in piece.tool_calls:
            found.setdefault(each.index, []).append(each)
    return tuple(
        types.AnsweredCall(
            parts[0].name, parts[0].id, "".join(p.arguments for p in parts), parts[-1].error
        )
        for parts in found.values()
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
        last_used_time=time_of(message.last_used_time),
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
        resident(message.adapter),
        message.slot,
        extents,
        targets,
        groups,
        message.launches,
        message.kernels,
    )


def _resident_target(message: inference_pb.ResidentTarget) -> types.ResidentTarget:
    segments = tuple(
        types.ResidentSegment(
            SEGMENT_KINDS.get(each.kind, types.SegmentKind.UNKNOWN),
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
        recurrent_states=_recurrent_states(message),
        weight_formats=tuple(
            types.WeightFormat(each.format, each.kernels) for each in message.weight_formats
        ),
        adapter_dtype=message.adapter_dtype,
        kv_dtype=message.kv_dtype,
        weight_form=message.weight_form,
        processor=_processor(message.processor) if message.HasField("processor") else None,
        ranks=tuple(_rank(each) for each in message.ranks),
        generates=message.generates if message.HasField("generates") else None,
        embedding=_embedding_info(message.embedding) if message.HasField("embedding") else None,
        classifier=_classifier_info(message) if message.HasField("classifier") else None,
    )


def _embedding_info(message: inference_pb.EmbeddingInfo) -> types.EmbeddingInfo:
    return types.EmbeddingInfo(
        pooling=inference_pb.Pooling.Name(message.pooling).removeprefix("POOLING_").lower(),
        normalized=message.normalized,
        size=message.size,
        dimensions=tuple(message.dimensions),
        prompt_names=tuple(message.prompt_names),
        default_prompt_name=message.default_prompt_name,
        max_tokens=message.max_tokens,
    )


def _classifier_info(message: inference_pb.GetServerInfoResponse) -> types.ClassifierInfo:
    found = message.classifier
    return types.ClassifierInfo(tuple(found.labels), found.per_token, found.scores_pairs)


def _rank(message: inference_pb.RankStatus) -> types.RankStatus:
    return types.RankStatus(
        index=message.index,
        process_id=message.process_id,
        answers=message.answers,
        resident_bytes=message.resident_bytes,
        weights_bytes=message.weights_bytes,
        kv_bytes=message.kv_bytes,
        arena_bytes=message.arena_bytes,
        num_steps=message.num_steps,
        step_seconds=message.step_seconds,
        exchange_seconds=message.exchange_seconds,
        pulled_bytes=message.pulled_bytes,
        running_pulls=message.running_pulls,
        num_threads=message.num_threads,
        processors=tuple(message.processors),
        stage=message.stage,
    )


def _recurrent_states(
    message: inference_pb.GetServerInfoResponse,
) -> types.RecurrentStates | None:
    if not message.HasField("recurrent_states"):
        return None
    states = message.recurrent_states
    return types.RecurrentStates(
        state_bytes=states.state_bytes,
        interval_tokens=states.interval_tokens,
        capacity=states.capacity,
        max_stored=states.max_stored,
        used=states.used,
        stored=states.stored,
    )


def _processor(message: inference_pb.Processor) -> types.Processor:
    return types.Processor(message.name, message.num_cores, message.num_processors, message.quota)


def _expert_layers(message: inference_pb.ExpertLayers) -> types.ExpertLayers:
    return types.ExpertLayers(tuple(message.layers), message.num_experts, message.num_chosen)


def _sampling_defaults(
    message: inference_pb.GetServerInfoResponse,
) -> types.SamplingDefaults | None:
    if not message.HasField("sampling_defaults"):
        return None
    defaults = message.sampling_defaults
    return types.SamplingDefaults(
        float(f"{defaults.temperature:.6g}"),
        defaults.top_k,
        float(f"{defaults.top_p:.6g}"),
        logprobs_mode=LOGPROBS_MODES.get(defaults.logprobs_mode, "raw"),
    )


# --- for operators of both ----------------------------------------------------------------------


def debug_part(
    message: store_pb.GetDebugInfoResponse | inference_pb.GetDebugInfoResponse,
) -> types.DebugPart:
    return types.DebugPart(message.name, message.content, message.error)


def trace_piece(message: inference_pb.ProfileStepsResponse) -> types.TracePiece:
    return types.TracePiece(message.chunk, message.num_steps)


def token_ids(response: inference_pb.TokenizeResponse) -> tuple[int, ...]:
    return tuple(response.token_ids)


def text(response: inference_pb.DetokenizeResponse) -> str:
    return response.text
