"""Types of requests to generate, and of their answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from loadout._rpc.arrays import PackedLogprobs, RoutedExperts

VersionPolicy = Literal["pin", "follow_keep", "follow_recompute"]
"""How a request reacts when its adapter's name moves to a newer version: finish on its own, or
continue with the newer one, with keys and values and recurrent states kept or recomputed."""


ToolChoice = Literal["auto", "none", "required"]
"""Whether an answer calls tools: as the model decides, never, or in any case."""


class FinishReason(enum.Enum):
    """Why a generation ended. UNKNOWN, here and below: the server is newer than this client."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Structure(TypedDict, total=False):
    """The form that an answer must have: exactly one of these. Of each token, only those can be
    chosen that continue such a text. An answer without enough tokens ends incomplete, with
    `FinishReason.LENGTH`."""

    json_schema: Mapping[str, Any] | str | bool
    """JSON that this JSON Schema allows: as objects, or as JSON."""
    json_object: Literal[True]
    """Any JSON object."""
    regex: str
    """A text that this regular expression matches as a whole, in the syntax of Rust's regex."""
    choice: list[str] | tuple[str, ...]
    """One of these texts."""
    grammar: str
    """A text of this grammar, in Lark or EBNF (GBNF)."""


class SamplingParams(TypedDict, total=False):
    """Sampling parameters of `generate`, `complete` and `sample`. A parameter that you leave out
    takes the server's default; see `ServerInfo.sampling_defaults`."""

    max_tokens: int
    """Most tokens to generate. Default: 256."""
    min_tokens: int
    """No end-of-sequence token and no stop before this many tokens. Default: 0."""
    temperature: float
    """0: greedy; otherwise 0.01 to 100. Default: the model's, or 1."""
    top_k: int
    """Sample from only this many most likely tokens. 0: off."""
    top_p: float
    """Sample from only the most likely tokens that together have this probability, above 0 and at
    most 1."""
    min_p: float
    """Sample from only tokens with at least this share of the most likely one's probability, 0 to
    1. Default: 0."""
    seed: int
    """The same seed gives the same tokens, regardless of other requests; on GPUs up to rounding."""
    stop: str | list[str] | tuple[str, ...]
    """Texts that end generation, at most 16. The returned text excludes them."""
    stop_token_ids: list[int] | tuple[int, ...]
    """Tokens that end generation, at most 256."""
    ignore_eos: bool
    """Continue after the model's end-of-sequence token. Default: False."""
    presence_penalty: float
    """Subtracted once from the logits of each generated token, -2 to 2. Default: 0."""
    frequency_penalty: float
    """Subtracted once per occurrence of a generated token, -2 to 2. Default: 0."""
    repetition_penalty: float
    """Divides positive logits and multiplies negative logits of tokens in prompt and output, 0.01
    to 100. Default: 1."""
    logprobs: int
    """Return the log probability of each token and of this many most likely tokens: at most 20, or
    1,024 with `packed_logprobs`."""
    logprobs_mode: Literal["raw", "processed"]
    """Distribution of `logprobs`: the model's own, or the one that the token was drawn from."""
    prompt_logprobs: int
    """Return the log probability of each prompt token except the first, and of this many (at most
    1,024) most likely tokens, from the model's own distribution."""
    structure: Structure
    """The form that the answer must have."""


class ToolCall(TypedDict):
    """A call of a tool. `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str
    id: NotRequired[str]
    """Id by which a result names the call."""


class Tool(TypedDict):
    """A function that an answer may call."""

    name: str
    """1 to 64 letters, digits, "_", "-" and "."."""
    description: NotRequired[str]
    """Purpose of the function, for the model."""
    parameters: NotRequired[Mapping[str, Any]]
    """JSON schema of its parameters. Default: it has none."""


class ChatImage(TypedDict):
    """An image in a message: its file, its hash, or both. If you give both, the client sends the
    hash. If the server lacks one of a call's images, the client uploads the files of all that have
    both."""

    data: NotRequired[bytes]
    """A PNG, JPEG, WebP or GIF file with one frame."""
    sha256: NotRequired[bytes]
    """SHA-256 hash of the file, as `upload_image` returns it."""
    position: NotRequired[int]
    """Number of characters of the message's content before it. Default: 0."""


class ChatMessage(TypedDict):
    """A message by the role "developer", "system", "user", "assistant", "tool", or one of the
    template."""

    role: str
    content: str
    reasoning: NotRequired[str]
    """Thoughts of an assistant, for templates that read them."""
    tool_calls: NotRequired[Sequence[ToolCall]]
    """Calls that an assistant has made."""
    tool_call_id: NotRequired[str]
    """The call of which a tool's message is the result."""
    name: NotRequired[str]
    """Name of the tool of which a message is the result."""
    images: NotRequired[Sequence[ChatImage]]
    """Images of a user's message or of a tool's result, in order, for models that read images."""


class ChatOptions(TypedDict, total=False):
    """Options of a chat, keywords of `generate`, `complete` and `sample`."""

    tools: Sequence[Tool]
    """Functions that the answer may call, at most 128. Its text is then without calls."""
    tool_choice: ToolChoice
    """Whether it calls any. Default: "auto"."""
    required_tool: str
    """Name of the function that it has to call."""
    single_tool_call: bool
    """Return only the first call. Default: False."""
    separate_reasoning: bool
    """Return thoughts in `reasoning`, not in the text. Default: False."""
    chat_template_kwargs: Mapping[str, bool | int | float | str | None]
    """Arguments of the chat template, such as `enable_thinking`, at most 16."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"]
    """How much the model thinks, if its chat template reads that."""
    thinking_token_budget: int
    """Most tokens of thoughts; the server then ends them, and the answer goes on. Default: no
    bound."""


class GenerationOptions(SamplingParams, ChatOptions, total=False):
    """Sampling parameters, and options of a chat."""


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A piece of a call of a tool; calls come one after the other."""

    index: int
    """Which call of the answer this belongs to, from 0."""
    name: str
    """Name of the tool, in a call's first piece only."""
    id: str
    """Id of the call, in its first piece only."""
    arguments: str
    """More of the arguments, as the model writes them."""
    error: str
    """Why the arguments are no JSON object, in a call's last piece only."""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call of a tool in an answer."""

    name: str
    id: str
    arguments: str
    """JSON, unless there is an `error`."""
    error: str = ""
    """Why the arguments are no JSON object."""

    def message(self) -> ToolCall:
        """Returns the call for the assistant's message in your history."""
        return ToolCall(name=self.name, arguments=self.arguments, id=self.id)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position; `top` begins with the most likely token."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `cached_prompt_tokens` came from the prefix cache."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in the queue, waiting for the adapter, and until the first token; server's clock."""

    queued_seconds: float
    adapter_wait_seconds: float
    first_token_seconds: float


@dataclass(frozen=True, slots=True)
class AdapterIdentity:
    """The version that a reference resolved to."""

    name: str
    """Name as "tenant/name@version"; the digest if you asked by digest."""
    digest: str
    is_inactive: bool = False
    """Whether the prompt lacks its invocation tokens (aLoRA), so that the base model answered."""
    scale: float | None = None
    """Factor of the adapter, if it is one of several."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a generation. `finish_reason`, `usage` and `timings` come with the last one.

    `adapter` is None for the base model, and for several adapters; those are in `adapters`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    usage: Usage | None
    adapter: AdapterIdentity | None
    timings: Timings | None
    adapters: tuple[AdapterIdentity, ...] = ()
    routed_experts: RoutedExperts | None = None
    """If requested. A long prompt's experts take several chunks, of which only the last has
    tokens."""
    index: int = 0
    """Which of `n` answers this belongs to."""
    packed_logprobs: PackedLogprobs | None = None
    """In place of `logprobs`, if requested."""
    prompt_logprobs: PackedLogprobs | None = None
    """If requested. Only the first of several answers has them, before its tokens."""
    kept_tokens: int = 0
    """Number of tokens whose keys and values, and recurrent states, are from earlier versions."""
    echoed_tokens: int = 0
    """How many of `token_ids`, from the first, echo the prompt. No version made them."""
    reasoning: str = ""
    """New thoughts, with `separate_reasoning`."""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    """New pieces of calls, with `tools`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation; `adapter` and `adapters` are as in Chunk."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage | None
    adapter: AdapterIdentity | None
    timings: Timings | None
    adapters: tuple[AdapterIdentity, ...] = ()
    routed_experts: RoutedExperts | None = None
    """Experts that all tokens except the last have chosen, if requested."""
    packed_logprobs: PackedLogprobs | None = None
    """In place of `logprobs`, if requested."""
    prompt_logprobs: PackedLogprobs | None = None
    """For all prompt tokens except the first, if requested. Only the first of several answers has
    them."""
    versions: tuple[tuple[AdapterIdentity, int], ...] = ()
    """The adapter's versions that made its tokens, in order, each with its number of tokens. An
    echoed prompt does not count."""
    reasoning: str = ""
    """Thoughts, with `separate_reasoning`."""
    tool_calls: tuple[AnsweredCall, ...] = ()
    """Calls, with `tools`."""
