"""Converts between protobuf messages and our types: pure functions that check every field, of
messages whose counts are within `bounds`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf import timestamp_pb2

from contract.protobuf import SEGMENT_KIND_NUMBERS, TARGET_KIND_NUMBERS
from inference_svc.adapters.layout import ModelLayout
from inference_svc.api.generate_call import (
    MAX_CHOICES,
    MAX_ID_CHARS,
    GenerateCall,
    checked_parts,
    checked_resume,
    checked_sampling,
    random_seed,
)
from inference_svc.api.grpc import results
from inference_svc.api.grpc.prompts import check, checked_salt, from_chat, from_prompt
from inference_svc.core import (
    NO_DEFAULTS,
    FinishReason,
    Request,
    SamplingDefaults,
    SamplingParams,
    VersionPolicy,
)
from inference_svc.engine.control.status_types import (
    AdapterDetails,
    RankStatus,
    RecurrentStatus,
    ResidentAdapter,
)
from inference_svc.engine.transport.messages import PauseMode, Timings, Usage
from inference_svc.frontend.output_stream import Delta
from inference_svc.grammars.grammar import Grammar
from inference_svc.host.cpus import Processor
from inference_svc.results.base import NOTHING, Scope, Wanted, grouped
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.answers.scanner import CallPiece
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}
MAX_PROFILED_STEPS = 200
PROFILE_SECONDS, MAX_PROFILE_SECONDS = 30.0, 300.0
"""How long to wait for the steps."""

_VERSION_POLICIES = {
    pb.VERSION_POLICY_UNSPECIFIED: VersionPolicy.PIN,
    pb.VERSION_POLICY_PIN: VersionPolicy.PIN,
    pb.VERSION_POLICY_FOLLOW_KEEP: VersionPolicy.FOLLOW_KEEP,
    pb.VERSION_POLICY_FOLLOW_RECOMPUTE: VersionPolicy.FOLLOW_RECOMPUTE,
}
_PAUSE_MODES = {
    pb.PAUSE_MODE_UNSPECIFIED: PauseMode.KEEP,
    pb.PAUSE_MODE_KEEP: PauseMode.KEEP,
    pb.PAUSE_MODE_WAIT: PauseMode.WAIT,
    pb.PAUSE_MODE_ABORT: PauseMode.ABORT,
}
_GENERATION_STATES = {
    "running": pb.GENERATION_STATE_RUNNING,
    "paused": pb.GENERATION_STATE_PAUSED,
    "asleep": pb.GENERATION_STATE_ASLEEP,
}

_TIERS = {"device": pb.ADAPTER_TIER_DEVICE, "host": pb.ADAPTER_TIER_HOST}


def from_generate_request(
    request: pb.GenerateRequest,
    vocab_size: int,
    deadline_s: float | None = None,
    defaults: SamplingDefaults = NO_DEFAULTS,
) -> GenerateCall:
    """Converts a message within its bounds; `deadline_s` is the caller's, in monotonic time. Raises
    InvalidArgument, naming the field."""
    check(len(request.request_id) <= MAX_ID_CHARS, "request_id", f"at most {MAX_ID_CHARS} long")
    if request.adapters and request.adapter:
        raise InvalidArgument("adapters must be empty where adapter is set", subject="adapters")
    check(request.n <= MAX_CHOICES, "n", f"at most {MAX_CHOICES}")
    wanted = results.from_request(request, defaults.logprobs_mode)
    sampling = from_sampling(
        request.sampling,
        vocab_size,
        defaults,
        is_prompt_enough=request.echo or wanted.has_scope(Scope.PROMPT),
    )
    reading = from_chat(request.chat) if request.WhichOneof("prompt") == "chat" else None
    return GenerateCall(
        request_id=request.request_id or uuid.uuid4().hex,
        adapter=request.adapter,
        parts=checked_parts(
            [(p.ref, p.scale if p.HasField("scale") else 1.0) for p in request.adapters]
        ),
        prompts=(from_prompt(request, reading),),
        sampling=sampling,
        wanted=wanted,
        min_revision=request.min_revision,
        priority=request.priority,
        cache_salt=checked_salt(request.cache_salt),
        deadline_s=deadline_s,
        version_policy=_from_policy(request.version_policy),
        num_choices=request.n or 1,
        echo=request.echo,
        grammar=_from_structure(request.sampling),
        reading=reading,
    )


def _from_structure(sampling: pb.SamplingParams) -> Grammar | None:
    if not sampling.HasField("structure"):
        return None
    structure = sampling.structure
    form = structure.WhichOneof("form")
    field = f"sampling.structure.{form}"
    if form == "json_schema":
        return Grammar.json_schema(structure.json_schema, field)
    if form == "regex":
        return Grammar.regex(structure.regex, field)
    if form == "choice":
        return Grammar.choice(structure.choice.texts, field)
    if form == "grammar":
        return Grammar.grammar(structure.grammar, field)
    forms = "one of json_schema, json_object, regex, choice, grammar"
    check(structure.json_object, "sampling.structure", forms)
    return Grammar.json_object(field)


def _from_policy(value: pb.VersionPolicy) -> VersionPolicy:
    policy = _VERSION_POLICIES.get(value)
    if policy is None:
        raise InvalidArgument(
            f"version_policy must be PIN, FOLLOW_KEEP or FOLLOW_RECOMPUTE, not {value}",
            subject="version_policy",
        )
    return policy


def from_pause_request(request: pb.PauseGenerationRequest) -> tuple[PauseMode, float]:
    """Returns the mode, and after which seconds to resume; 0: never. Raises InvalidArgument."""
    mode = _PAUSE_MODES.get(request.mode)
    if mode is None:
        raise InvalidArgument(
            f"mode must be KEEP, WAIT or ABORT, not {request.mode}", subject="mode"
        )
    if not request.HasField("resume_after_seconds"):
        return mode, 0.0
    return mode, checked_resume(request.resume_after_seconds)


def from_sampling(
    message: pb.SamplingParams,
    vocab_size: int,
    defaults: SamplingDefaults = NO_DEFAULTS,
    *,
    is_prompt_enough: bool = False,
) -> SamplingParams:
    """Returns the parameters with defaults filled in. Raises InvalidArgument."""
    fixed = SamplingParams()
    params = SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else fixed.max_tokens,
        min_tokens=message.min_tokens,
        temperature=(
            message.temperature if message.HasField("temperature") else defaults.temperature
        ),
        top_k=message.top_k if message.HasField("top_k") else defaults.top_k,
        top_p=message.top_p if message.HasField("top_p") else defaults.top_p,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else random_seed(),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=(
            message.repetition_penalty
            if message.HasField("repetition_penalty")
            else fixed.repetition_penalty
        ),
    )
    return checked_sampling(params, vocab_size, "sampling.", is_prompt_enough=is_prompt_enough)


# --- responses ----------------------------------------------------------------------------------


def to_identities(binding: Binding | None) -> list[pb.AdapterIdentity]:
    """Returns the adapters of a sum, if it is one."""
    return [
        pb.AdapterIdentity(name=part.label, digest=part.digest, scale=scale)
        for part, scale in (binding.parts if binding is not None else ())
    ]


def to_identity(binding: Binding | None, request: Request) -> pb.AdapterIdentity | None:
    """Returns None for the base model, and for several adapters."""
    if binding is None or binding.parts:
        return None
    return pb.AdapterIdentity(
        name=binding.label, digest=binding.digest, is_inactive=request.has_inactive_adapter
    )


def to_generation_state(state: str) -> pb.GenerationState:
    return _GENERATION_STATES[state]


class Answer:
    """One of a call's answers, as responses: their common fields, and how many tokens there were
    before. `wanted` are the results that the call asks for."""

    def __init__(
        self,
        request_id: str,
        identity: pb.AdapterIdentity | None = None,
        identities: Sequence[pb.AdapterIdentity] = (),
        index: int = 0,
        wanted: Wanted = NOTHING,
    ) -> None:
        self._common: dict[str, Any] = {
            "request_id": request_id,
            "adapter": identity,
            "adapters": identities,
            "index": index,
        }
        self._is_first = index == 0
        self._wanted = wanted
        self._num_tokens = 0

    def responses(self, delta: Delta) -> Iterator[pb.GenerateResponse]:
        """Yields a delta as one response or, if it has long arrays, as several, of which the last
        has all else."""
        if not delta.parts:
            yield self._response(delta, {})
            return
        groups, place = grouped(delta.parts), results.Place(self._wanted, self._num_tokens)
        previous: results.Fields | None = None
        for fields in results.arrays(groups, place):
            if previous is not None:
                yield pb.GenerateResponse(**self._of(delta), **previous)
            previous = fields
        yield self._response(delta, (previous or {}) | results.fields(groups, place))

    def _of(self, delta: Delta) -> dict[str, Any]:
        """Returns the common fields of a delta's responses, with the version that has made its
        tokens."""
        version = delta.version
        if version is None:
            return self._common
        identity = pb.AdapterIdentity(name=version.label, digest=version.digest)
        return {**self._common, "adapter": identity, "kept_tokens": version.num_kept}

    def _response(self, delta: Delta, fields: results.Fields) -> pb.GenerateResponse:
        self._num_tokens += len(delta.token_ids)
        response = pb.GenerateResponse(
            token_ids=[*delta.echoed_ids, *delta.token_ids],
            echoed_tokens=len(delta.echoed_ids),
            text=delta.text,
            reasoning=delta.thoughts,
            tool_calls=map(_to_call_piece, delta.calls),
            **self._of(delta),
            **fields,
        )
        if delta.finish_reason is not None:
            response.finish_reason = _FINISH_REASONS[delta.finish_reason]
        if delta.usage is not None:
            response.usage.CopyFrom(to_usage(delta.usage, is_first=self._is_first))
        if delta.timings is not None:
            response.timings.CopyFrom(to_timings(delta.timings))
        return response


def _to_call_piece(piece: CallPiece) -> pb.ToolCallPiece:
    return pb.ToolCallPiece(
        index=piece.index,
        name=piece.name,
        id=piece.call_id,
        arguments=piece.arguments,
        error=piece.error,
    )


def to_usage(usage: Usage, *, is_first: bool = True) -> pb.Usage:
    """The prompt of several answers counts once."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens if is_first else 0,
        cached_prompt_tokens=usage.cached_prompt_tokens if is_first else 0,
        completion_tokens=usage.completion_tokens,
    )


def to_timings(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queued_seconds=timings.queued_s,
        adapter_wait_seconds=timings.adapter_wait_s,
        first_token_seconds=timings.first_token_s,
    )


def to_resident_adapter(
    adapter: ResidentAdapter, names: Sequence[str], is_superseded: bool
) -> pb.ResidentAdapter:
    last_used = timestamp_pb2.Timestamp()
    last_used.FromMicroseconds(int(adapter.last_used_time_s * 1e6))
    return pb.ResidentAdapter(
        digest=adapter.digest,
        names=names,
        tier=_TIERS[adapter.tier],
        bytes=adapter.num_bytes,
        rank=adapter.rank,
        pinned=adapter.pinned,
        running_requests=adapter.running_requests,
        last_used_time=last_used,
        load_seconds=adapter.load_seconds,
        superseded=is_superseded,
        not_finite_requests=adapter.num_not_finite,
    )


def to_inspected(
    details: AdapterDetails, layout: ModelLayout, adapter: pb.ResidentAdapter
) -> pb.InspectAdapterResponse:
    """Names the targets, and lists the ones that the adapter has in each group."""
    response = pb.InspectAdapterResponse(
        adapter=adapter,
        slot=details.slot,
        extents=[pb.ResidentExtent(offset=start, bytes=size) for start, size in details.extents],
        launches=sum(details.launches.values()),
        kernels=details.kernels,
    )
    numbers = (details.ranks, details.offsets, details.lengths)
    members: dict[str, dict[int, None]] = {}
    previous = -1
    for index, kind, rank, offset, length in zip(
        details.targets.tolist(), details.kinds, *(each.tolist() for each in numbers), strict=True
    ):
        if index != previous:  # the segments of a target are neighbours
            target, previous = layout.all_targets[index], index
            part = response.targets.add(
                name=target.name, layer=target.layer, kind=TARGET_KIND_NUMBERS[target.kind]
            )
        place = len(response.targets) - 1
        members.setdefault(layout.computed_with(index, kind), {})[place] = None
        part.rank = max(part.rank, rank)
        part.segments.add(kind=SEGMENT_KIND_NUMBERS.get(kind), offset=offset, bytes=length)
    for name, launches in details.launches.items():
        response.groups.add(name=name, targets=members.get(name, ()), launches=launches)
    return response


def to_memory(memory: dict[str, tuple[int, int]]) -> list[pb.MemoryUse]:
    return [
        pb.MemoryUse(name=name, used_bytes=used, capacity_bytes=capacity)
        for name, (used, capacity) in memory.items()
    ]


def to_rank_status(rank: RankStatus) -> pb.RankStatus:
    return pb.RankStatus(
        index=rank.index,
        stage=rank.stage,
        process_id=rank.process_id,
        answers=rank.answers,
        resident_bytes=rank.resident_bytes,
        weights_bytes=rank.weights_bytes,
        kv_bytes=rank.kv_bytes,
        arena_bytes=rank.arena_bytes,
        num_steps=rank.num_steps,
        step_seconds=rank.step_s,
        exchange_seconds=rank.exchange_s,
        pulled_bytes=rank.pulled_bytes,
        running_pulls=rank.num_pulls,
        num_threads=rank.num_threads,
        processors=rank.processors,
    )


def to_recurrent_states(status: RecurrentStatus | None) -> pb.RecurrentStates | None:
    if status is None:
        return None
    return pb.RecurrentStates(
        state_bytes=status.state_bytes,
        interval_tokens=status.interval_tokens,
        capacity=status.capacity,
        max_stored=status.max_stored,
        used=status.used,
        stored=status.stored,
    )


def to_processor(processor: Processor | None) -> pb.Processor | None:
    return None if processor is None else pb.Processor(**processor._asdict())


def from_profile_request(request: pb.ProfileStepsRequest) -> tuple[int, float]:
    """Returns the number of steps and the seconds to wait for them. Raises InvalidArgument."""
    num_steps = request.num_steps
    if not 1 <= num_steps <= MAX_PROFILED_STEPS:
        raise InvalidArgument(
            f"num_steps must be from 1 to {MAX_PROFILED_STEPS}", subject="num_steps"
        )
    timeout_s = PROFILE_SECONDS
    if request.HasField("timeout_seconds"):
        timeout_s = request.timeout_seconds
    if not 0 < timeout_s <= MAX_PROFILE_SECONDS:  # NaN, too
        raise InvalidArgument(
            f"timeout_seconds must be above 0 and at most {MAX_PROFILE_SECONDS:g}",
            subject="timeout_seconds",
        )
    return num_steps, timeout_s
