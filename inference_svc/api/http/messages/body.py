"""The body of /v1/messages, as a chat and its options."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from inference_svc.api.generate_call import (
    MAX_ID_CHARS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    GenerateCall,
    check_results,
    checked_chat,
)
from inference_svc.api.http.chat.formatter import ChatFormatter
from inference_svc.api.http.errors import Names
from inference_svc.api.http.generation_body import (
    AnswerOptions,
    JsonSchema,
    ReadBody,
    ResponseFormat,
    SamplingBody,
)
from inference_svc.api.http.messages.blocks import (
    Anything,
    BlockMessage,
    CallBlock,
    Texts,
    misplaced,
    result_ids,
    text_of,
    to_messages,
)
from inference_svc.api.http.request import Body
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.tools import (
    AUTO,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    NONE,
    REQUIRED,
    ReadingOptions,
    checked_tools,
    schema_text,
    to_options,
)
from inference_svc.core import SamplingParams
from inference_svc.results.base import Wanted
from inference_svc.text.chat import NO_PARAMETERS, Chat, ChatMessage, Tool
from inference_svc.text.conversation import NO_EFFORT
from inference_svc.text.pieces import AnyPieces
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument

CLEAR_THINKING = "clear_thinking_20251015"
CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE, "tool": ""}


class ToolFields(Body):
    """A function. Tools that Anthropic's servers run are refused by their type."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Annotated[str, PlainValidator(schema_text)] = NO_PARAMETERS

    # Accepted, without effect.
    strict: bool | None = None
    cache_control: Anything | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=8)] | None = None
    input_examples: Annotated[list[Any], Field(max_length=64)] | None = None


class ChoiceFields(Body):
    type: Literal["auto", "any", "none", "tool"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)] | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingFields(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    display: Literal["summarized", "omitted"] | None = None  # others come whole


class FormatFields(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputFields(Body):
    format: FormatFields | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


def _to_edit(value: object) -> None:
    """Takes edits of thoughts: templates leave out earlier ones, as their models were trained."""
    if not isinstance(value, dict) or value.get("type") != CLEAR_THINKING:
        raise ValueError(
            f'the type must be "{CLEAR_THINKING}": the server changes no history, so leave out '
            "or shorten messages before you send them"
        )


class ContextFields(Body):
    edits: (
        Annotated[list[Annotated[None, PlainValidator(_to_edit)]], Field(max_length=8)] | None
    ) = None


class MetadataFields(Body):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class PromptBody(Body):
    """The fields that the prompt is made of."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    messages: Annotated[
        list[BlockMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Texts | None = None
    tools: Annotated[list[ToolFields], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ChoiceFields | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None
    cache_control: Anything | None = None

    # Accepted with values that change nothing.
    context_management: ContextFields | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    container: None = None

    @cached_property
    def reading(self) -> ReadingOptions:
        """Raises InvalidArgument."""
        choice = self.tool_choice or ChoiceFields(type="auto")
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidArgument(
                'tool_choice.name: set it with type "tool", and only then',
                subject="tool_choice.name",
            )
        thinking = self.thinking or ThinkingFields(type="adaptive")
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise InvalidArgument(
                'thinking.budget_tokens: set it with type "enabled", and only then',
                subject="thinking.budget_tokens",
            )
        tools = [
            Tool(tool.name, tool.description or "", tool.input_schema) for tool in self.tools or ()
        ]
        return to_options(
            checked_tools(tools, ""),
            CHOICES[choice.type],
            name=choice.name or "",
            is_parallel=not choice.disable_parallel_tool_use,
            has_thoughts=True,
            schema_path=".input_schema",
            budget=thinking.budget_tokens,
            budget_name="thinking.budget_tokens",
        )

    def to_prompt(self) -> Chat:
        """Raises InvalidArgument."""
        if (found := misplaced(self.messages)) is not None:
            field, role = found
            raise InvalidArgument(f"{field}: only in a message with the role {role}", subject=field)
        check_results(result_ids(self.messages))
        last = self.messages[-1]
        is_continued = last.role == "assistant"
        if is_continued and any(isinstance(each, CallBlock) for each in last.content):
            field = f"messages[{len(self.messages) - 1}]"
            raise InvalidArgument(
                f"{field}: send the results of its calls after it, in a message of the user",
                subject=field,
            )
        system = text_of(self.system)
        messages = [ChatMessage("system", system)] if system else []
        messages += to_messages(self.messages)
        chat = checked_chat(tuple(messages), None, is_continued, False, tools=self.reading.tools)
        return replace(chat, reasoning_effort=self._effort, may_lack_effort=True)

    @property
    def _is_switched_off(self) -> bool:
        return self.thinking is not None and self.thinking.type == "disabled"

    @property
    def _effort(self) -> str:
        if self._is_switched_off:
            return NO_EFFORT
        effort = None if self.output_config is None else self.output_config.effort
        return "xhigh" if effort == "max" else effort or ""


class CountBody(PromptBody):
    """The body of /v1/messages/count_tokens."""


class MessagesBody(PromptBody, ReadBody):
    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(fail_fast=True, max_length=MAX_STOPS),
        ]
        | None
    ) = None

    # Accepted, without effect.
    metadata: MetadataFields | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    stream_options: None = None

    @cached_property
    def _sampling(self) -> SamplingBody:
        return SamplingBody(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
        )

    @property
    def sampling_fields(self) -> tuple[SamplingBody, str]:
        return self._sampling, ""

    @property
    def format_field(self) -> ResponseFormat | None:
        found = None if self.output_config is None else self.output_config.format
        if found is None:
            return None
        schema = JsonSchema.model_validate({"schema": found.schema_})
        return ResponseFormat(type="json_schema", json_schema=schema)

    @property
    def answer(self) -> AnswerOptions:
        return AnswerOptions(bool(self.stream), includes_usage=True)

    def to_call(
        self,
        request_id: str,
        adapter: str,
        prompts: tuple[Prompt, ...],
        sampling: SamplingParams,
        wanted: Wanted,
    ) -> GenerateCall:
        """Raises InvalidArgument."""
        call = super().to_call(request_id, adapter, prompts, sampling, wanted)
        grammar = call.grammar
        if grammar is not None:
            grammar = replace(grammar, field="output_config.format.schema")
        return replace(call, grammar=grammar, stop_field="stop_sequences")


class Messages:
    """See `generate.Endpoint`."""

    body: ClassVar = MessagesBody
    id_prefix: ClassVar = "msg"
    object: ClassVar = "message"
    chunk_object: ClassVar = "message"
    names: ClassVar[Names] = {
        "adapter": "model",
        **dict.fromkeys(("prompt", "chat", "chat.messages"), "messages"),
        "chat.tools": "tools",
    }
    has_prompt_ids_in_choices: ClassVar = False
    hides_thoughts = False

    def prompts(self, body: MessagesBody) -> tuple[Prompt, ...]:
        """Raises InvalidArgument."""
        self.hides_thoughts = body.thinking is not None and body.thinking.display == "omitted"
        return (body.to_prompt(),)

    def sampling(self, body: MessagesBody, facts: ServerFacts) -> SamplingParams:
        fields, _ = body.sampling_fields
        return fields.to_sampling(body.max_tokens, facts.sampling)

    def top_logprobs(self, body: MessagesBody) -> int | None:
        return None

    def formatter(self, index: int, pieces: AnyPieces, includes_ids: bool) -> ChatFormatter:
        raise NotImplementedError("blocks have no formatter")
