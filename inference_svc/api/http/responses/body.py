"""The body of /v1/responses, as a chat and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from inference_svc.api.generate_call import (
    MAX_ID_CHARS,
    MAX_MESSAGE_NAME_CHARS,
    MAX_MESSAGES,
    MAX_TOOL_CALL_ID_CHARS,
    GenerateCall,
    check_results,
    checked_chat,
    checked_message,
)
from inference_svc.api.http.chat.formatter import ChatFormatter
from inference_svc.api.http.chat.images import DETAILS, Content, ImageUrl
from inference_svc.api.http.chat.tools import ALLOWED, Choice, FunctionItem, to_choice
from inference_svc.api.http.errors import Names
from inference_svc.api.http.generation_body import (
    AnswerOptions,
    Ignored,
    IgnoredFields,
    JsonSchema,
    ReadBody,
    ResponseFormat,
    SamplingBody,
    StreamOptions,
)
from inference_svc.api.http.request import Body
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.tools import MAX_TOOLS, ReadingOptions, checked_tools, to_options
from inference_svc.core import SamplingParams
from inference_svc.results.base import Wanted
from inference_svc.text.chat import Chat, ChatMessage, Tool, ToolCall
from inference_svc.text.pieces import AnyPieces
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument

FORMAT = "text.format"
_IMAGE_KEYS = {"type", "image_url", "detail", "file_id"}
TEXTS = ("input_text", "output_text", "text", "reasoning_text")
_CallId = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_CALL_ID_CHARS)]
_Anything = Annotated[list[Any], Field(max_length=MAX_TOOLS)]


def _to_nothing(value: object) -> None:
    """Takes null only."""
    if value is not None:
        raise ValueError("must be null: the server stores no response, so send all items as input")


_NotStored = Annotated[None, PlainValidator(_to_nothing)]


def _to_text(value: object) -> str:
    """Joins a text in parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    for part in value:
        is_text = isinstance(part, dict) and part.get("type") in TEXTS
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(f"a part must be a text: its type one of {', '.join(TEXTS)}")
    return "".join(part["text"] for part in value)


def _to_content(value: object) -> Content:
    """Joins a text in parts, with images between them."""
    if not isinstance(value, list):
        return Content(_to_text(value))
    text, images = "", []
    for index, part in enumerate(value):
        if isinstance(part, dict) and part.get("type") == "input_image":
            images.append(ImageUrl(len(text), f"content[{index}].image_url", _to_url(part)))
        else:
            text += _to_text([part])
    return Content(text, tuple(images))


def _to_url(part: Mapping[str, Any]) -> str:
    url, detail = part.get("image_url"), part.get("detail")
    has_others = part.get("file_id") is not None or part.keys() - _IMAGE_KEYS
    if isinstance(url, str) and detail in (None, *DETAILS) and not has_others:
        return url
    raise ValueError(
        'an image must be {"type": "input_image", "image_url": "data:image/..."}, with detail '
        f"{', '.join(DETAILS)} or none: the server takes no files over HTTP"
    )


_Text = Annotated[str, PlainValidator(_to_text)]
_Content = Annotated[Content, PlainValidator(_to_content)]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: _Content

    # Accepted, without effect: of our answers.
    id: Ignored | None = None
    status: Ignored | None = None
    phase: Ignored | None = None

    def to_message(self, path: str) -> ChatMessage:
        """Raises InvalidArgument, naming an image after `path`."""
        images = tuple(image.to_image(path) for image in self.content.images)
        return checked_message(ChatMessage(self.role, self.content.text, images=images), path)


class CallItem(Body):
    type: Literal["function_call"]
    call_id: _CallId
    name: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_NAME_CHARS)]
    arguments: str

    id: Ignored | None = None
    status: Ignored | None = None
    arguments_error: Ignored | None = None
    parsed_arguments: Any = None  # of OpenAI's helpers
    namespace: None = None
    caller: None = None


class ResultItem(Body):
    type: Literal["function_call_output"]
    call_id: _CallId
    output: _Text

    id: Ignored | None = None
    status: Ignored | None = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: _Text | None = None

    id: Ignored | None = None
    status: Ignored | None = None
    summary: _Anything | None = None
    encrypted_content: None = None


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]


def _with_types(value: object) -> object:
    """A text is a user's message, and an item without a type is a message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "type" not in item else item
        for item in value
    ]


class _OfType(Body):
    type: Literal["function"]


class FunctionTool(FunctionItem, _OfType):
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=8)] | None = None

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters)


def _to_named(value: object) -> Choice | None:
    """Accepts fields next to their type, as this route has them."""
    if isinstance(value, dict) and value.keys() == {"type", "mode", "tools"}:
        tools = value["tools"]
        tools = list(map(_nested, tools)) if isinstance(tools, list) else None
        value = {"type": value["type"], ALLOWED: {"mode": value["mode"], "tools": tools}}
    return to_choice(_nested(value))


def _nested(value: object) -> object:
    """Returns the object of a function's name as a chat has it."""
    if isinstance(value, dict) and value.keys() == {"type", "name"}:
        return {"type": value["type"], "function": {"name": value["name"]}}
    return value


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # thoughts come whole
    generate_summary: None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def to_format(self) -> ResponseFormat:
        """Returns the same as a chat has it. Raises InvalidArgument for a schema that the type does
        not take, or that is missing."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise InvalidArgument(
                f'{FORMAT}.schema: set it with type "json_schema", and only then',
                subject=f"{FORMAT}.schema",
            )
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        schema = JsonSchema.model_validate({"schema": self.schema_})
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class EventOptions(StreamOptions):
    include_usage: None = None  # the last event has it


class ResponsesBody(IgnoredFields, ReadBody):
    """`input` is the whole history: this server keeps none."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    input: Annotated[
        list[Item],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_with_types),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Choice | None, PlainValidator(_to_named)] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None

    # Accepted with values that change nothing: there is no store of responses.
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: _NotStored = None
    conversation: _NotStored = None
    prompt: None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8)] | None = (
        None  # thoughts come in clear text
    )
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    max_tool_calls: None = None
    stream_options: EventOptions | None = None

    @cached_property
    def _sampling(self) -> SamplingBody:
        return SamplingBody(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_output_tokens,
        )

    @property
    def sampling_fields(self) -> tuple[SamplingBody, str]:
        return self._sampling, ""

    @property
    def format_field(self) -> ResponseFormat | None:
        found = None if self.text is None else self.text.format
        return None if found is None else found.to_format()

    @property
    def answer(self) -> AnswerOptions:
        return AnswerOptions(bool(self.stream), includes_usage=True)

    @cached_property
    def reading(self) -> ReadingOptions:
        """Raises InvalidArgument."""
        choice = self.tool_choice or Choice()
        return to_options(
            checked_tools([tool.to_tool() for tool in self.tools or ()], ""),
            choice.kind,
            name=choice.name,
            allowed=choice.allowed,
            is_parallel=self.parallel_tool_calls is not False,
            has_thoughts=True,
        )

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
        if grammar is not None and self.format_field is not None:
            has_schema = grammar.field != "response_format"
            grammar = replace(grammar, field=f"{FORMAT}.schema" if has_schema else FORMAT)
        field = "" if self.max_output_tokens is None else "max_output_tokens"
        return replace(call, grammar=grammar, max_tokens_field=field)

    def to_chat(self) -> Chat:
        """Raises InvalidArgument."""
        check_results(
            (
                f"input[{index}].call_id",
                [item.call_id] if isinstance(item, CallItem) else [],
                item.call_id if isinstance(item, ResultItem) else "",
            )
            for index, item in enumerate(self.input)
        )
        messages = tuple(_joined(self._messages()))
        chat = checked_chat(messages, None, False, False, tools=self.reading.tools)
        effort = None if self.reasoning is None else self.reasoning.effort
        return replace(chat, reasoning_effort=effort or "")

    def _messages(self) -> Iterator[ChatMessage]:
        """Yields a message for each item: thoughts and calls are an assistant's. Raises
        InvalidArgument."""
        if self.instructions:
            yield ChatMessage("system", self.instructions)
        for index, item in enumerate(self.input):
            if isinstance(item, MessageItem):
                yield item.to_message(f"input[{index}]")
            elif isinstance(item, CallItem):
                call = ToolCall(item.name, item.arguments, item.call_id)
                yield ChatMessage("assistant", "", tool_calls=(call,))
            elif isinstance(item, ResultItem):
                yield ChatMessage("tool", item.output, tool_call_id=item.call_id)
            elif item.content:
                yield ChatMessage("assistant", "", item.content)


def _joined(messages: Iterator[ChatMessage]) -> Iterator[ChatMessage]:
    """Joins what an assistant has thought, said and called in one answer."""
    open_message: ChatMessage | None = None
    for each in messages:
        last = open_message
        if (
            last is not None
            and each.role == "assistant"
            and not (each.reasoning or (each.content and (last.content or last.tool_calls)))
        ):
            open_message = replace(
                last,
                content=last.content + each.content,
                tool_calls=last.tool_calls + each.tool_calls,
            )
            continue
        if last is not None:
            yield last
        open_message = each if each.role == "assistant" else None
        if open_message is None:
            yield each
    if open_message is not None:
        yield open_message


class Responses:
    """See `generate.Endpoint`."""

    body: ClassVar = ResponsesBody
    id_prefix: ClassVar = "resp"
    object: ClassVar = "response"
    chunk_object: ClassVar = "response"
    names: ClassVar[Names] = {
        "adapter": "model",
        **dict.fromkeys(("prompt", "chat", "chat.messages"), "input"),
        "chat.tools": "tools",
        "chat.reasoning_effort": "reasoning.effort",
    }
    has_prompt_ids_in_choices: ClassVar = False

    def prompts(self, body: ResponsesBody) -> tuple[Prompt, ...]:
        """Raises InvalidArgument."""
        return (body.to_chat(),)

    def sampling(self, body: ResponsesBody, facts: ServerFacts) -> SamplingParams:
        fields, _ = body.sampling_fields
        return fields.to_sampling(body.max_output_tokens or facts.max_model_len, facts.sampling)

    def top_logprobs(self, body: ResponsesBody) -> int | None:
        return None

    def formatter(self, index: int, pieces: AnyPieces, includes_ids: bool) -> ChatFormatter:
        raise NotImplementedError("items have no formatter")


def settings(body: ResponsesBody) -> Mapping[str, Any]:
    """Returns the fields of a request that its answer repeats."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": _repeated(body.tool_choice or Choice()),
        "tools": [{"type": "function", "name": tool.name} for tool in body.tools or ()],
        "store": False,
        "previous_response_id": None,
        "truncation": "disabled",
    }


def _repeated(choice: Choice) -> str | Mapping[str, Any]:
    """Returns a choice as a request has it."""
    if choice.name:
        return _named(choice.name)
    if not choice.allowed:
        return choice.kind
    return {"type": ALLOWED, "mode": choice.kind, "tools": list(map(_named, choice.allowed))}


def _named(name: str) -> dict[str, str]:
    return {"type": "function", "name": name}
