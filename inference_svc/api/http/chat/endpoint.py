"""The body of /v1/chat/completions, and the call that it becomes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from inference_svc.api.generate_call import (
    MAX_MESSAGES,
    checked_chat,
    checked_variables,
)
from inference_svc.api.http.chat.formatter import ChatFormatter
from inference_svc.api.http.chat.messages import Message, to_messages
from inference_svc.api.http.chat.tools import Choice, Tools, to_choice, to_tools
from inference_svc.api.http.errors import Names
from inference_svc.api.http.generation_body import GenerationBody, ReadBody
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.tools import ReadingOptions, to_options
from inference_svc.core import SamplingParams
from inference_svc.results.logprobs import MAX_LOGPROBS
from inference_svc.text.chat import Variable
from inference_svc.text.pieces import AnyPieces
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument

_Nothing = Annotated[list[Any], Field(max_length=0)]


def _to_variables(value: object) -> dict[str, Variable]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return checked_variables(value)


Variables = Annotated[dict[str, Variable], PlainValidator(_to_variables)]


class ChatBody(ReadBody, GenerationBody):
    messages: Annotated[
        list[Message],
        Field(fail_fast=True),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: Tools | None = None
    tool_choice: Annotated[Choice | None, PlainValidator(to_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    # Extensions, by vLLM's names, and one by SGLang's.
    separate_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    prediction: Any = None  # accepted, without effect: it may only save time

    # Accepted with values that change nothing.
    verbosity: Literal["medium"] | None = None
    store: Literal[False] | None = None
    modalities: (
        Annotated[list[Literal["text"]], Field(fail_fast=True), Field(max_length=8)] | None
    ) = None
    functions: _Nothing | None = None
    function_call: Literal["none", "auto"] | None = None

    @cached_property
    def reading(self) -> ReadingOptions:
        """Raises InvalidArgument."""
        choice = self.tool_choice or Choice()
        return to_options(
            to_tools(self.tools or ()),
            choice.kind,
            name=choice.name,
            allowed=choice.allowed,
            is_parallel=self.parallel_tool_calls is not False,
            has_thoughts=self.separate_reasoning is not False,
            schema_path=".function.parameters",
            budget=self.thinking_token_budget,
        )

    @property
    def max_tokens_field(self) -> str:
        return super().max_tokens_field or (
            "" if self.max_completion_tokens is None else "max_completion_tokens"
        )


class ChatCompletions:
    """See `generate.Endpoint`."""

    body: ClassVar = ChatBody
    id_prefix: ClassVar = "chatcmpl"
    object: ClassVar = "chat.completion"
    chunk_object: ClassVar = "chat.completion.chunk"
    names: ClassVar[Names] = {
        "adapter": "model",
        **dict.fromkeys(("prompt", "chat", "chat.messages"), "messages"),
        **{f"chat.{name}": name for name in ("tools", "chat_template_kwargs", "reasoning_effort")},
    }
    has_prompt_ids_in_choices: ClassVar = False

    def prompts(self, body: ChatBody) -> tuple[Prompt, ...]:
        """Raises InvalidArgument."""
        chat = checked_chat(
            tuple(to_messages(body.messages)),
            body.add_generation_prompt,
            bool(body.continue_final_message),
            bool(body.add_special_tokens),
            tools=body.reading.tools,
        )
        effort = body.reasoning_effort or ""
        variables = body.chat_template_kwargs or {}
        return (replace(chat, variables=variables, reasoning_effort=effort),)

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
