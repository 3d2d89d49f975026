"""A call to generate, or to pool prompts, independent of its transport: its fields, their checks,
and the engine requests made from it."""

from __future__ import annotations

import math
import secrets
import struct
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from inference_svc.api.tools import ReadingOptions
from inference_svc.core import MAX_PARTS, AdapterKey, Request, SamplingParams, VersionPolicy
from inference_svc.grammars.grammar import Grammar
from inference_svc.results.base import NOTHING, Kind, Scope, Wanted
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.chat import Chat, ChatMessage, Tool, Variable
from inference_svc.text.conversation import with_names
from inference_svc.text.cut import NO_LIMIT, PromptLimit
from inference_svc.text.pair import Encoded
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument

MAX_ID_CHARS = 256
MAX_PAUSE_SECONDS = 86_400.0
MAX_DEADLINE_SECONDS = 1e6
"""Callers without a deadline may send centuries, longer than a clock can wait."""

MAX_MESSAGES = 1 << 14
"""Of a chat: more than fits into any model's context."""

MAX_TOOL_CALLS = 128
"""Calls in one message: as many as OpenAI allows tools in a request."""
MAX_TOOL_CALL_ID_CHARS = 512
MAX_MESSAGE_NAME_CHARS = 256
MAX_NAME_SHOWN = 64
"""The most of a caller's name or id that an error quotes."""

MAX_VARIABLES, MAX_VARIABLE_NAME_CHARS, MAX_VARIABLE_CHARS = 16, 64, 512
"""Arguments of a chat template."""
MAX_VARIABLE = 1 << 53
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""OpenAI's."""

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CHOICES = 128
"""Choices of one call, for all its prompts together."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_PENALTY = 2.0
MAX_PART_SCALE = 100.0
NUM_SEEDS = 1 << 64

_SINGLE = struct.Struct("f")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """`adapter` "" is the base model, unless there are `parts`: references and scales of adapters
    whose sum it is. Each of the `prompts` is answered by `num_choices` requests, of which the first
    one has the prompt's results. With `echo` each answer begins with its prompt.

    `adapter_field`, `prompts_field`, `stop_field` and `max_tokens_field` are the caller's names of
    these fields, the second "" where it is the transport's only prompt, the last "" where it gave
    no limit. With a `last_prompt_field` the last prompt has this name, and is no item of a list.
    `max_logprobs` bounds the logprobs of all requests together;
    with `withholds_parts` an answer has no results of a stop string's tokens. An id that is not
    unique, such as an id that a mesh sends with many calls, is none to the engine. An answer whose
    call has no `reading` is given as it is. With `max_running` at most so many of its requests are
    in the engine at once; with `max_prompt_tokens` its prompts have no more tokens in all, and each
    keeps the `prompt_limit`.
    """

    request_id: str
    adapter: str
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    min_revision: int = 0
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    num_choices: int = 1
    adapter_field: str = "adapter"
    max_tokens_field: str = ""
    stop_field: str = "sampling.stop"
    max_logprobs: int | None = None
    is_id_unique: bool = True
    parts: tuple[tuple[str, float], ...] = ()
    wanted: Wanted = NOTHING
    version_policy: VersionPolicy = VersionPolicy.PIN
    echo: bool = False
    withholds_parts: bool = False
    grammar: Grammar | None = None
    reading: ReadingOptions | None = None
    prompts_field: str = ""
    last_prompt_field: str = ""
    max_running: int | None = None
    max_prompt_tokens: int | None = None
    prompt_limit: PromptLimit = NO_LIMIT

    def prompt_field(self, index: int) -> str:
        """Returns the caller's name of one of several prompts."""
        if self.last_prompt_field and index == len(self.prompts) - 1:
            return self.last_prompt_field
        return f"{self.prompts_field}[{index}]"

    @property
    def kind(self) -> Kind:
        return self.wanted.kind

    @property
    def num_answer_tokens(self) -> int:
        """The tokens of an answer that a prompt leaves room for."""
        return 1 if self.kind is Kind.GENERATE else 0

    def without_prompts(self) -> GenerateCall:
        """Returns the parts of the call that are still needed once its requests are made."""
        return replace(self, prompts=())

    def to_requests(
        self,
        prompt_index: int,
        prompt: Encoded,
        binding: Binding | None,
        home_tenant: str,
        max_model_len: int,
        end_ids: tuple[int, ...] = (),
        vocab_size: int = 0,
    ) -> list[Request]:
        """Returns the requests of one prompt. `home_tenant` is the caller's. An adapter's `end_ids`
        that it has rows for end them as the model's own tokens do; `vocab_size` is the model's."""
        tenant, activation = "", 0
        key: AdapterKey = ""
        names: tuple[str, ...] = ()
        if binding is not None:
            tenant, key, names = binding.tenant, binding.key, binding.names
            if binding.invocation_tokens:
                found = activation_of(prompt.token_ids, binding.invocation_tokens)
                # Until then the pages are the base model's, and it is the base model's request
                # where the prompt does not invoke the adapter.
                tenant = ""
                key, activation = ("", 0) if found is None else (key, found)
        max_tokens = min(self.sampling.max_tokens, max_model_len - len(prompt.token_ids))
        vocab_size += 0 if binding is None else binding.added_tokens
        # A tokenizer may have tokens that neither the model nor the adapter has rows for.
        end_ids = tuple(token for token in end_ids if token < vocab_size)
        request = Request(
            request_id=self.request_id,
            prompt_token_ids=prompt.token_ids,
            second_start=prompt.second_start,
            sampling=_ended_by(end_ids, _shortened(self.sampling, max_tokens)),
            key=key,
            activation=activation,
            names=names,
            # Neither tenants that share an adapter nor the adapters of one caller share prefixes.
            # Tenants have no "/", so that no two triples give one seed.
            cache_seed=f"{home_tenant}/{tenant}/{self.cache_salt}",
            tenant=home_tenant,
            priority=self.priority,
            arrival_s=time.monotonic(),
            deadline_s=self.deadline_s,
            wanted=self.wanted,
            version_policy=self.version_policy,
            vocab_size=vocab_size,
            grammar=self.grammar,
        )
        return self._choices(request, prompt_index)

    def _choices(self, request: Request, prompt_index: int) -> list[Request]:
        """Returns a request for each choice. The first has the call's seed, so that it equals a
        single choice; the others have the next ones."""
        if len(self.prompts) * self.num_choices == 1:
            return [request]
        first, seed = prompt_index * self.num_choices, self.sampling.seed
        group = secrets.token_hex(8) if self.num_choices > 1 else ""
        return [
            replace(
                request,
                request_id=f"{self.request_id}-{first + index}",
                group=group,
                sampling=replace(request.sampling, seed=(seed + index) % NUM_SEEDS),
                wanted=request.wanted.without(Scope.PROMPT) if index else request.wanted,
            )
            for index in range(self.num_choices)
        ]

    def check_stops(self, requests: Iterable[Request], eos_token_ids: Collection[int]) -> None:
        """Raises InvalidArgument where a stop token is none of the request's, or a request may
        choose none of its tokens before `min_tokens`; the model's own `eos_token_ids` are banned,
        too."""
        field = f"{self.stop_field}_token_ids"
        highest = max(self.sampling.stop_token_ids, default=0)
        for request in requests:
            sampling = request.sampling
            if highest >= request.vocab_size:
                raise InvalidArgument(
                    f"{field} must be below {request.vocab_size}; {highest} is no token",
                    subject=field,
                )
            ends = () if sampling.ignore_eos else eos_token_ids
            num_banned = len({*sampling.stop_token_ids, *ends})
            if sampling.min_tokens and num_banned >= request.vocab_size:
                raise InvalidArgument(
                    f"{field} and the model's own end tokens are all {request.vocab_size} tokens "
                    "of the vocabulary: no other token can be chosen before min_tokens",
                    subject=field,
                )

    def bounded(self, requests: list[Request]) -> list[Request]:
        """Returns all requests of the call within `max_logprobs`. Raises InvalidArgument naming the
        caller's limit; where it gave none, each request ends at its part of the bound."""
        bound = self.max_logprobs
        if bound is None:
            return requests
        bound -= self._check_prompt_logprobs(requests, bound)
        per_token = self.wanted.num_logprobs(Scope.TOKEN, 1)
        num_tokens = sum(request.sampling.max_tokens for request in requests)
        if num_tokens * per_token <= bound:
            return requests
        if self.max_tokens_field or bound < per_token * len(requests):
            field = self.max_tokens_field or "logprobs"
            raise InvalidArgument(
                f"{field}: {num_tokens} tokens of all choices with {per_token} logprobs each "
                f"exceed the {bound} logprobs that this answer may still have",
                subject=field,
            )
        max_tokens = bound // (per_token * len(requests))
        return [
            replace(request, sampling=_shortened(request.sampling, max_tokens))
            for request in requests
        ]

    def _check_prompt_logprobs(self, requests: list[Request], bound: int) -> int:
        """Returns how many there are of all prompts. Raises InvalidArgument."""
        count = sum(
            request.wanted.num_logprobs(Scope.PROMPT, len(request.prompt_token_ids))
            for request in requests
        )
        if count > bound:
            raise InvalidArgument(
                f"prompt_logprobs: {count} of all prompts exceed the {bound} that an answer may "
                "have: ask for fewer, or use gRPC",
                subject="prompt_logprobs",
            )
        return count


def activation_of(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Returns the index in the prompt from which an adapter with these invocation tokens is active:
    where they follow one another for the last time. None if they do not."""
    if max(invocation) > sys.maxunicode:  # beyond every vocabulary
        return None
    # Searching in a string takes linear time, for any contents.
    text, pattern = ("".join(map(chr, reversed(ids))) for ids in (prompt, invocation))
    place = text.find(pattern)
    return None if place < 0 else len(prompt) - place - len(invocation)


def _shortened(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    max_tokens = min(sampling.max_tokens, max_tokens)
    min_tokens = min(sampling.min_tokens, max_tokens)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _ended_by(end_ids: tuple[int, ...], sampling: SamplingParams) -> SamplingParams:
    if sampling.ignore_eos or not end_ids:
        return sampling
    ids = dict.fromkeys((*sampling.stop_token_ids, *end_ids))
    return replace(sampling, stop_token_ids=tuple(ids))


def checked_message(message: ChatMessage, path: str) -> ChatMessage:
    """Returns a message of a conversation with the fields of its role: clients keep names of users,
    and thoughts with all messages, which have no effect. Raises InvalidArgument naming the field
    after `path`."""
    for name, value, role in (
        ("tool_calls", message.tool_calls, "assistant"),
        ("tool_call_id", message.tool_call_id, "tool"),
    ):
        if value and message.role != role:
            field = f"{path}.{name}"
            raise InvalidArgument(f"{field}: only in a message of the {role}", subject=field)
    if message.images and message.role != "user":
        where = message.images[0].where
        raise InvalidArgument(f"{where}: only in a message of the user", subject=where)
    if message.role == "assistant":
        return replace(message, name="") if message.name else message
    if message.role in ("developer", "system", "user"):
        return ChatMessage(message.role, message.content, images=message.images)
    return message


def checked_chat(
    messages: tuple[ChatMessage, ...],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    add_special_tokens: bool,
    path: str = "",
    tools: tuple[Tool, ...] = (),
) -> Chat:
    """Returns a conversation. It ends where an answer begins, unless the caller has another choice.
    Raises InvalidArgument naming the field, prefixed by `path`."""
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidArgument(
                f"{path}continue_final_message: not with add_generation_prompt, which begins a new "
                "message",
                subject=f"{path}continue_final_message",
            )
        if messages[-1].role != "assistant":
            field = f"{path}messages[{len(messages) - 1}].role"
            raise InvalidArgument(
                f"{field}: must be assistant with continue_final_message", subject=field
            )
    check_results(
        (f"{path}messages[{i}].tool_call_id", [c.call_id for c in m.tool_calls], m.tool_call_id)
        for i, m in enumerate(messages)
    )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    messages = tuple(with_names(messages))
    return Chat(messages, add_generation_prompt, continue_final_message, add_special_tokens, tools)


def check_results(history: Iterable[tuple[str, Iterable[str], str]]) -> None:
    """Raises InvalidArgument for a result of a call that is not before it. `history` has a field,
    the ids of calls, and the id in the field of a result, "" for others. After calls without ids
    results may have any."""
    known: set[str] = set()
    for field, call_ids, result_id in history:
        if result_id and "" not in known and result_id not in known:
            raise InvalidArgument(
                f"{field}: no message of the assistant before it has a call with the id "
                f"{result_id[:MAX_NAME_SHOWN]!a}: send the message with the call, too",
                subject=field,
            )
        known.update(call_ids)


def checked_variables(found: Mapping[object, object]) -> dict[str, Variable]:
    """Returns arguments of a chat template. Raises ValueError."""
    if len(found) > MAX_VARIABLES:
        raise ValueError(f"must have at most {MAX_VARIABLES} entries")
    checked: dict[str, Variable] = {}
    for name, value in found.items():
        if not isinstance(name, str) or len(name) > MAX_VARIABLE_NAME_CHARS:
            raise ValueError(f"must have names of at most {MAX_VARIABLE_NAME_CHARS} characters")
        is_short = not isinstance(value, str) or len(value) <= MAX_VARIABLE_CHARS
        is_finite = not isinstance(value, int | float) or abs(value) <= MAX_VARIABLE
        if not isinstance(value, bool | int | float | str | None) or not (is_short and is_finite):
            raise ValueError(
                f"{name!a} must be true, false, null, a number of at most 2^53, or a text of at "
                f"most {MAX_VARIABLE_CHARS} characters"
            )
        checked[name] = value
    return checked


def deadline_after(remaining_s: float | None) -> float | None:
    """Returns the monotonic time of a deadline; None for none."""
    if remaining_s is None or remaining_s > MAX_DEADLINE_SECONDS:
        return None
    return time.monotonic() + remaining_s


def checked_resume(seconds: float, field: str = "resume_after_seconds") -> float:
    """Returns how long generation may be paused. Raises InvalidArgument naming the field."""
    if not 0 < seconds <= MAX_PAUSE_SECONDS:  # NaN, too
        raise InvalidArgument(
            f"{field} must be above 0 and at most {MAX_PAUSE_SECONDS:g}", subject=field
        )
    return seconds


# --- sampling -----------------------------------------------------------------------------------


def random_seed() -> int:
    return secrets.randbelow(NUM_SEEDS)


def checked_sampling(
    params: SamplingParams, vocab_size: int, path: str = "", *, is_prompt_enough: bool = False
) -> SamplingParams:
    """Returns `params` in single precision, so that the same numbers give the same tokens whether
    they came as text or as floats. With `is_prompt_enough` no token need be generated. Raises
    InvalidArgument naming the field, prefixed by `path`."""
    check = _FieldChecks(path)
    least = 0 if is_prompt_enough else 1
    required = "at least 1, or 0 with prompt_logprobs or echo"
    check.require(params.max_tokens >= least, "max_tokens", required)
    within = 0 <= params.min_tokens <= params.max_tokens
    check.require(within, "min_tokens", f"from 0 to max_tokens ({params.max_tokens})")
    check.require(params.top_k >= 0, "top_k", "at least 0")
    return replace(
        params,
        temperature=check.number(
            "temperature", params.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, or_zero=True
        ),
        # More than the vocabulary has is the same as off.
        top_k=params.top_k if params.top_k < vocab_size else 0,
        top_p=check.share("top_p", params.top_p),
        min_p=check.number("min_p", params.min_p, 0, 1),
        seed=params.seed % NUM_SEEDS,
        stop=check.stops(params.stop),
        stop_token_ids=check.token_ids(params.stop_token_ids),
        presence_penalty=check.number(
            "presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY
        ),
        frequency_penalty=check.number(
            "frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY
        ),
        repetition_penalty=check.number(
            "repetition_penalty", params.repetition_penalty, MIN_REPETITION, MAX_REPETITION
        ),
    )


def check_grammar(call: GenerateCall, *, has_ends: bool) -> None:
    """Raises InvalidArgument, naming the fields, where a call's grammar and its other fields
    contradict each other. `has_ends`: its answers can end with a token, its own stops included."""
    assert call.grammar is not None
    field, sampling = call.grammar.field, call.sampling
    path = call.stop_field.removesuffix("stop")
    refused = ""
    if sampling.ignore_eos:
        refused = f"not with {path}ignore_eos: the answer ends where its text is complete"
    elif sampling.min_tokens:
        refused = f"not with {path}min_tokens: the form decides how long a text is"
    elif not has_ends:
        refused = f"this model has no end token: set {path}stop_token_ids"
    if refused:
        raise InvalidArgument(f"{field}: {refused}", subject=field)


def checked_parts(parts: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Returns the adapters of a sum, their scales in single precision. Raises
    InvalidArgument naming the field."""
    if len(parts) > MAX_PARTS:
        raise InvalidArgument(f"adapters must be at most {MAX_PARTS}", subject="adapters")
    checked: list[tuple[str, float]] = []
    for index, (ref, scale) in enumerate(parts):
        check = _FieldChecks(f"adapters[{index}].")
        check.require(bool(ref), "ref", "an adapter's reference: '' is the base model")
        earlier = [other for other, _ in checked]
        check.require(ref not in earlier, "ref", f"another than before: {ref[:MAX_ID_CHARS]} twice")
        checked.append((ref, check.number("scale", scale, -MAX_PART_SCALE, MAX_PART_SCALE)))
    return tuple(checked)


class _FieldChecks:
    """Checks fields, which the caller knows by `path` and their name."""

    def __init__(self, path: str) -> None:
        self._path = path

    def require(self, holds: bool, name: str, requirement: str) -> None:
        if not holds:
            field = f"{self._path}{name}"
            raise InvalidArgument(f"{field} must be {requirement}", subject=field)

    def number(
        self, name: str, value: float, low: float, high: float, *, or_zero: bool = False
    ) -> float:
        if or_zero and value == 0:
            return 0.0
        # A float on the wire has seven digits: 0.01 arrives as 0.00999999978.
        holds = low <= value <= high or math.isclose(value, low, rel_tol=1e-6)
        prefix = "0, or " if or_zero else ""
        allowed = f"{prefix}from {low:g} to {high:g}, not {value:g}"
        self.require(math.isfinite(value) and holds, name, allowed)
        return _single(value)

    def share(self, name: str, value: float) -> float:
        single = _single(value) if 0 < value <= 1 else 0.0
        self.require(single > 0, name, f"above 0 and at most 1, not {value:g}")
        return single

    def stops(self, stops: Sequence[str]) -> tuple[str, ...]:
        self.require(len(stops) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        self.require(all(stops), "stop", "not an empty string")
        fits = all(len(stop) <= MAX_STOP_CHARS for stop in stops)
        self.require(fits, "stop", f"at most {MAX_STOP_CHARS} long")
        return tuple(stops)

    def token_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Which ids there are depends on the adapter: see `GenerateCall.check_stops`."""
        name = "stop_token_ids"
        self.require(len(ids) <= MAX_STOP_TOKEN_IDS, name, f"at most {MAX_STOP_TOKEN_IDS} ids")
        self.require(min(ids, default=0) >= 0, name, "at least 0")
        return tuple(dict.fromkeys(ids))


def _single(value: float) -> float:
    rounded: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
    return rounded
