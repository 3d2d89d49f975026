"""/v1/chat/completions: its body, and the format of its choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from inference_svc.api.generate_call import MAX_MESSAGES, checked_chat
from inference_svc.api.http.errors import Names
from inference_svc.api.http.generation_body import GenerationBody, Ignored
from inference_svc.api.http.request import Body
from inference_svc.api.http.response import FINISH_REASONS, Choice
from inference_svc.api.service import ServerFacts
from inference_svc.core import SamplingParams
from inference_svc.frontend.output_stream import Delta
from inference_svc.results.base import of_kind
from inference_svc.results.logprobs import MAX_LOGPROBS, PackedLogprobs, TokenLogprobs
from inference_svc.text.pieces import AnyPieces
from inference_svc.text.prompt import ChatMessage, Prompt
from servicekit.errors import InvalidArgument

MAX_KIND_CHARS = 64
"""How much of a part's type an error quotes."""
MAX_ANNOTATIONS = 1024
MIN_LOGPROB = -9999.0
"""JSON has no infinity."""

_Anything = Annotated[list[Any], Field(max_length=MAX_ANNOTATIONS)]
_Nothing = Annotated[list[Any], Field(max_length=0)]


def _to_text(value: object) -> str | None:
    """Joins a text in parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    return "".join(map(_to_part, value))


def _to_part(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and value.keys() == {"type", "text"}:
        text = value["text"]
        if kind == "text" and isinstance(text, str):
            return text
    found = f", not {kind[:MAX_KIND_CHARS]}" if isinstance(kind, str) and kind != "text" else ""
    raise ValueError(
        f'a part must be {{"type": "text", "text": ...}}: only text is supported{found}'
    )


class Message(Body):
    """All fields of our responses are accepted back, and so are fields of others' responses that
    clients keep in their history, if they change nothing about the text."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str | None, PlainValidator(_to_text)] = None

    # Accepted, without effect: templates know none.
    name: Annotated[str, Field(max_length=256)] | None = None  # OpenAI's requests
    id: Ignored | None = None  # agents' histories: vllm#10463
    annotations: _Anything | None = None  # OpenAI's responses with web search
    reasoning_content: str | None = None  # DeepSeek, vLLM, LiteLLM: litellm#30835
    reasoning: str | None = None  # OpenRouter, vLLM: can1357/oh-my-pi#1157
    reasoning_details: _Anything | None = None  # OpenRouter: Roo-Code#11429
    thinking_blocks: _Anything | None = None  # LiteLLM: litellm#32684

    # Accepted with values that change nothing: OpenAI's responses.
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: _Nothing | None = None

    @property
    def text(self) -> str | None:
        """The content; an assistant's may be empty or absent. None: it is missing."""
        return "" if self.content is None and self.role == "assistant" else self.content


class ChatBody(GenerationBody):
    messages: Annotated[
        list[Message],
        Field(fail_fast=True),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    # Extensions, by vLLM's names.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # Accepted with values that change nothing.
    store: Literal[False] | None = None
    modalities: (
        Annotated[list[Literal["text"]], Field(fail_fast=True), Field(max_length=8)] | None
    ) = None
    tools: _Nothing | None = None
    functions: _Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def max_tokens_field(self) -> str:
        return super().max_tokens_field or (
            "" if self.max_completion_tokens is None else "max_completion_tokens"
        )


def prompt_logprobs(scores: PackedLogprobs, pieces: AnyPieces) -> list[dict[str, Any]]:
    """Returns for each token of a prompt, by id, itself and the most likely ones."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = pieces.of(token_id).text
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    columns = (each.tolist() for each in scores[1:])
    found = []
    for token_id, logprob, rank, top_ids, top_logprobs in zip(*columns, strict=True):
        entries = {str(token_id): entry(token_id, logprob, rank)}
        for place, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True)):
            entries.setdefault(str(top_id), entry(top_id, value, place + 1))
        found.append(entries)
    return found


def _to_messages(messages: Sequence[Message]) -> Iterator[ChatMessage]:
    """Raises InvalidArgument for a message without content that needs some."""
    for index, message in enumerate(messages):
        text = message.text
        if text is None:
            field = f"messages[{index}].content"
            raise InvalidArgument(
                f"{field}: must be a text or a list of parts; only an assistant's may be missing",
                subject=field,
            )
        yield ChatMessage(message.role, text)


class ChatCompletions:
    """See `generate.Endpoint`."""

    body: ClassVar = ChatBody
    id_prefix: ClassVar = "chatcmpl"
    object: ClassVar = "chat.completion"
    chunk_object: ClassVar = "chat.completion.chunk"
    names: ClassVar[Names] = {
        "adapter": "model",
        **dict.fromkeys(("prompt", "chat", "chat.messages"), "messages"),
    }
    has_prompt_ids_in_choices: ClassVar = False

    def prompts(self, body: ChatBody) -> tuple[Prompt, ...]:
        """Raises InvalidArgument."""
        chat = checked_chat(
            tuple(_to_messages(body.messages)),
            body.add_generation_prompt,
            bool(body.continue_final_message),
            bool(body.add_special_tokens),
        )
        return (chat,)

    def sampling(self, body: ChatBody, facts: ServerFacts) -> SamplingParams:
        """Without a limit, as many tokens as the context allows. Raises InvalidArgument."""
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise InvalidArgument(
                "max_tokens: is the old name of max_completion_tokens; set one of them",
                subject="max_tokens",
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidArgument("top_logprobs: only with logprobs set", subject="top_logprobs")
        if body.max_completion_tokens == 0 and body.prompt_logprobs is None:
            raise InvalidArgument(
                "max_completion_tokens: must be at least 1, or 0 with prompt_logprobs",
                subject="max_completion_tokens",
            )
        limits = (body.max_completion_tokens, body.max_tokens, facts.max_model_len)
        max_tokens = next(limit for limit in limits if limit is not None)
        return body.to_sampling(max_tokens, facts.sampling)

    def top_logprobs(self, body: ChatBody) -> int | None:
        return (body.top_logprobs or 0) if body.logprobs else None

    def formatter(self, index: int, pieces: AnyPieces, includes_ids: bool) -> ChatFormatter:
        return ChatFormatter(index, pieces, includes_ids)


class ChatFormatter:
    """See `response.ChoiceFormatter`."""

    logprob_constants: Mapping[str, None] = {"refusal": None}
    scores_in_choice = False

    def __init__(self, index: int, pieces: AnyPieces, includes_ids: bool) -> None:
        self._index = index
        self._pieces = pieces
        self._includes_ids = includes_ids
        self._has_begun = False

    def full(self, choice: Choice) -> dict[str, Any]:
        assert choice.finish_reason is not None
        formatted = {
            "index": self._index,
            "message": {"role": "assistant", "content": choice.text},
            "finish_reason": FINISH_REASONS[choice.finish_reason],
        }
        return formatted | {"token_ids": choice.token_ids} if self._includes_ids else formatted

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        reason = delta.finish_reason
        is_new = delta.text or delta.parts or reason or self._includes_ids
        if self._has_begun and not is_new:
            return None
        content: dict[str, Any] = {} if self._has_begun else {"role": "assistant", "content": ""}
        self._has_begun = True
        if delta.text:
            content["content"] = delta.text
        formatted = {
            "index": self._index,
            "delta": content,
            "logprobs": self._chunk_logprobs(delta),
            "finish_reason": None if reason is None else FINISH_REASONS[reason],
        }
        return formatted | {"token_ids": delta.token_ids} if self._includes_ids else formatted

    def prompt_logprobs(self, scores: PackedLogprobs) -> list[dict[str, Any]]:
        return prompt_logprobs(scores, self._pieces)

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        return {"content": [self._token(each) for each in tokens]}

    def _chunk_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        tokens = of_kind(delta.parts, TokenLogprobs)
        return {**self.logprobs(tokens), **self.logprob_constants} if tokens else None

    def _token(self, token: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
        return self._entry(token.token_id, token.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._pieces.of(token_id)
        return {
            "token": piece.text,
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(piece.data),
        }
