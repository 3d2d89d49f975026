"""Protobuf messages to our words and back: pure functions. Every field is checked here."""

from __future__ import annotations

import math
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.protobuf import timestamp_pb2

from inference_svc.core import (
    FinishReason,
    Request,
    ResidentAdapter,
    SamplingParams,
    Timings,
    TokenLogprobs,
    Usage,
)
from inference_svc.errors import InvalidRequest
from inference_svc.generation import Delta
from inference_svc.names import Binding
from inference_svc.text.prompt import ChatMessage, Prompt
from loadout.inference.v1 import inference_pb2 as pb

MAX_ID_CHARS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_PENALTY = 2.0
MAX_DEADLINE_SECONDS = 1e6
"""Callers without a deadline may send centuries, which no clock of ours can wait for."""

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}
_TIERS = {"device": pb.ADAPTER_TIER_DEVICE, "host": pb.ADAPTER_TIER_HOST}


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked GenerateRequest; its prompt is not tokenised and its adapter not resolved yet."""

    request_id: str
    adapter: str
    min_revision: int
    prompt: Prompt
    sampling: SamplingParams
    priority: int
    cache_salt: str

    def to_request(
        self,
        prompt_token_ids: tuple[int, ...],
        binding: Binding | None,
        home_tenant: str,
        max_model_len: int,
        remaining_s: float | None,
    ) -> Request:
        """For the engine. `home_tenant` is the caller's; `remaining_s` what its deadline leaves."""
        now_s = time.monotonic()
        if remaining_s is not None and remaining_s > MAX_DEADLINE_SECONDS:
            remaining_s = None
        max_tokens = min(self.sampling.max_tokens, max_model_len - len(prompt_token_ids))
        min_tokens = min(self.sampling.min_tokens, max_tokens)
        tenant = "" if binding is None else binding.tenant
        return Request(
            request_id=self.request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=replace(self.sampling, max_tokens=max_tokens, min_tokens=min_tokens),
            digest="" if binding is None else binding.digest,
            # Neither tenants that share an adapter nor the adapters of one caller share prefixes.
            # Tenants have no "/", so that no two triples give one seed.
            cache_seed=f"{home_tenant}/{tenant}/{self.cache_salt}",
            tenant=home_tenant,
            priority=self.priority,
            arrival_s=now_s,
            deadline_s=None if remaining_s is None else now_s + remaining_s,
        )


def from_generate_request(request: pb.GenerateRequest, vocab_size: int) -> GenerateCall:
    """Raises InvalidRequest, naming the field."""
    _check(len(request.request_id) <= MAX_ID_CHARS, "request_id", f"at most {MAX_ID_CHARS} long")
    _check(len(request.cache_salt) <= MAX_ID_CHARS, "cache_salt", f"at most {MAX_ID_CHARS} long")
    return GenerateCall(
        request_id=request.request_id or uuid.uuid4().hex,
        adapter=request.adapter,
        min_revision=request.min_revision,
        prompt=_from_prompt(request, vocab_size),
        sampling=from_sampling(request.sampling, vocab_size),
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _from_prompt(request: pb.GenerateRequest, vocab_size: int) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        ids = tuple(request.token_ids.ids)
        largest = max(ids, default=0)
        _check(largest < vocab_size, "token_ids", f"below {vocab_size}; {largest} is no token")
        return ids
    if kind == "chat":
        _check(bool(request.chat.messages), "chat", "at least one message")
        return tuple(ChatMessage(m.role, m.content) for m in request.chat.messages)
    raise InvalidRequest("prompt is missing: one of text, token_ids, chat", subject="prompt")


def from_sampling(params: pb.SamplingParams, vocab_size: int) -> SamplingParams:
    """Defaults filled in, every field within its range. Raises InvalidRequest."""
    defaults = SamplingParams()
    max_tokens = params.max_tokens if params.HasField("max_tokens") else defaults.max_tokens
    min_tokens = params.min_tokens
    temperature = params.temperature if params.HasField("temperature") else defaults.temperature
    top_p = params.top_p if params.HasField("top_p") else defaults.top_p
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    logprobs = params.logprobs if params.HasField("logprobs") else None
    _check(max_tokens >= 1, "sampling.max_tokens", "at least 1")
    _check(min_tokens <= max_tokens, "sampling.min_tokens", f"at most max_tokens ({max_tokens})")
    if temperature != 0:
        _check_range("temperature", temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, "0, or ")
    _check(0 < top_p <= 1, "sampling.top_p", f"above 0 and at most 1, not {top_p:g}")
    _check_range("min_p", params.min_p, 0, 1)
    _check_range("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("repetition_penalty", repetition, MIN_REPETITION, MAX_REPETITION)
    if logprobs is not None:
        _check(logprobs <= MAX_LOGPROBS, "sampling.logprobs", f"at most {MAX_LOGPROBS}")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        # More than there are tokens is as good as off.
        top_k=params.top_k if params.top_k < vocab_size else 0,
        top_p=top_p,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        stop=_from_stop(params.stop),
        stop_token_ids=_from_stop_token_ids(params.stop_token_ids, vocab_size),
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=repetition,
        logprobs=logprobs,
    )


def _from_stop(stops: Sequence[str]) -> tuple[str, ...]:
    field = "sampling.stop"
    _check(len(stops) <= MAX_STOPS, field, f"at most {MAX_STOPS} strings")
    _check(all(stops), field, "not an empty string")
    _check(all(len(s) <= MAX_STOP_CHARS for s in stops), field, f"at most {MAX_STOP_CHARS} long")
    return tuple(stops)


def _from_stop_token_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    field = "sampling.stop_token_ids"
    _check(len(ids) <= MAX_STOP_TOKEN_IDS, field, f"at most {MAX_STOP_TOKEN_IDS} ids")
    unknown = next((i for i in ids if i >= vocab_size), None)
    _check(unknown is None, field, f"below {vocab_size}; {unknown} is no token")
    return tuple(dict.fromkeys(ids))


def _check_range(name: str, value: float, low: float, high: float, or_else: str = "") -> None:
    allowed = f"{or_else}from {low:g} to {high:g}, not {value:g}"
    # A float on the wire has seven digits: 0.01 arrives as 0.00999999978.
    holds = low <= value <= high or math.isclose(value, low, rel_tol=1e-6)
    _check(math.isfinite(value) and holds, f"sampling.{name}", allowed)


def _check(holds: bool, field: str, requirement: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field} must be {requirement}", subject=field)


# --- answers ------------------------------------------------------------------------------------


def to_identity(binding: Binding | None) -> pb.AdapterIdentity | None:
    """None for the base model."""
    if binding is None:
        return None
    return pb.AdapterIdentity(name=binding.label, digest=binding.digest)


def to_generate_response(
    request_id: str, delta: Delta, identity: pb.AdapterIdentity | None
) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=request_id, token_ids=delta.token_ids, text=delta.text, adapter=identity
    )
    if delta.logprobs:
        response.logprobs.extend(map(_to_logprobs, delta.logprobs))
    if delta.finish_reason is not None:
        response.finish_reason = _FINISH_REASONS[delta.finish_reason]
    if delta.usage is not None:
        response.usage.CopyFrom(_to_usage(delta.usage))
    if delta.timings is not None:
        response.timings.CopyFrom(_to_timings(delta.timings))
    return response


def _to_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=pb.Logprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[pb.Logprob(token_id=i, logprob=value) for i, value in logprobs.top],
    )


def _to_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _to_timings(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queued_seconds=timings.queued_s,
        adapter_wait_seconds=timings.adapter_wait_s,
        first_token_seconds=timings.first_token_s,
    )


def to_resident_adapter(adapter: ResidentAdapter, names: Sequence[str]) -> pb.ResidentAdapter:
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
    )


def to_memory(memory: dict[str, tuple[int, int]]) -> list[pb.MemoryUse]:
    return [
        pb.MemoryUse(name=name, used_bytes=used, capacity_bytes=capacity)
        for name, (used, capacity) in memory.items()
    ]
