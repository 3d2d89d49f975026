"""/tokenize, /detokenize and /version, by vLLM's names: the tokens of a prompt, and their text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypeVar, cast

from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_svc.api.generate_call import MAX_ID_CHARS, MAX_MESSAGES, checked_chat
from inference_svc.api.generate_stream import INLINE_TOKENS
from inference_svc.api.http.chat.endpoint import Variables
from inference_svc.api.http.chat.messages import Message, to_messages
from inference_svc.api.http.chat.tools import Tools, to_tools
from inference_svc.api.http.errors import Names, set_names
from inference_svc.api.http.models import adapter_of
from inference_svc.api.http.request import (
    MAX_BODY_BYTES,
    MAX_VALUES,
    Body,
    admit,
    authenticated,
    body_bytes,
    read_body,
)
from inference_svc.api.http.response import AnswerMemory, FullResponse
from inference_svc.api.http.sse import to_json
from inference_svc.api.http.tokens import to_token_ids
from inference_svc.api.service import Service
from inference_svc.core import Action, Principal
from inference_svc.text.prompt import Prompt, Text
from inference_svc.text.text_model import TextModel
from servicekit.errors import InvalidArgument
from servicekit.shares import Shares

NAMES: Names = {
    "adapter": "model",
    **dict.fromkeys(("chat", "chat.messages"), "messages"),
    **{f"chat.{name}": name for name in ("tools", "chat_template_kwargs")},
}


class ToEncode(Protocol):
    """A body that names a prompt, and the model whose tokens it has."""

    @property
    def model(self) -> str | None: ...
    def to_prompt(self) -> Prompt:
        """Raises InvalidArgument."""
        ...


B = TypeVar("B", bound=Body)


class TokenizeBody(Body):
    """A text, or a chat; `model` null is the base model."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    prompt: str | None = None
    messages: (
        Annotated[
            list[Message], Field(fail_fast=True), Field(min_length=1, max_length=MAX_MESSAGES)
        ]
        | None
    ) = None
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def to_prompt(self) -> Prompt:
        """Raises InvalidArgument."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgument("prompt: exactly one of prompt and messages", subject="prompt")
        if self.messages is None:
            self._check_text()
            return Text(self.prompt or "", self.add_special_tokens is not False)
        chat = checked_chat(
            tuple(to_messages(self.messages)),
            self.add_generation_prompt,
            bool(self.continue_final_message),
            bool(self.add_special_tokens),
            tools=to_tools(self.tools or ()),
        )
        return replace(chat, variables=self.chat_template_kwargs or {})

    def _check_text(self) -> None:
        names = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        for name in names:
            if getattr(self, name) is not None:
                raise InvalidArgument(f"{name}: only with messages", subject=name)


class DetokenizeBody(Body):
    """`model` null is the base model."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    tokens: Annotated[tuple[int, ...], PlainValidator(to_token_ids)]

    def to_prompt(self) -> Prompt:
        return self.tokens


class TokenizerRoutes:
    def __init__(self, service: Service, answers: Shares) -> None:
        self._service = service
        self._answers = answers

    async def tokenize(self, request: Request) -> Response:
        set_names(request, NAMES)
        principal, body, (token_ids, text) = await encoded(self._service, request, TokenizeBody)
        found: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._service.facts.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            found["token_strs"] = [text.pieces.of(each).text for each in token_ids]
        return await self._respond(principal, found)

    async def detokenize(self, request: Request) -> Response:
        """The text has special tokens, too."""
        set_names(request, {**NAMES, "prompt": "tokens"})
        principal, _, (token_ids, text) = await encoded(self._service, request, DetokenizeBody)
        if len(token_ids) <= INLINE_TOKENS:
            return await self._respond(principal, {"prompt": text.decode_all(token_ids)})
        whole = await asyncio.to_thread(text.decode_all, token_ids)
        return await self._respond(principal, {"prompt": whole})

    async def version(self, request: Request) -> Response:
        with authenticated(request) as caller:
            admit(request, self._service.access.authorize(caller, Action.INFO))
        return JSONResponse({"version": self._service.facts.versions.get("loadout", "")})

    async def _respond(self, principal: Principal, found: Mapping[str, Any]) -> Response:
        """Raises ShareExceeded if too much of the caller's is not read yet."""
        await asyncio.sleep(0)
        content = to_json(found).encode()
        memory = AnswerMemory(self._answers, principal.account)
        memory.add(len(content))
        return FullResponse([content], {}, memory)


async def encoded(
    service: Service, request: Request, kind: type[B], *, takes_api_key: bool = False
) -> tuple[Principal, B, tuple[tuple[int, ...], TextModel]]:
    """Returns the caller, the body of its request, and the tokens of its prompt, with the text
    model of its adapter. Raises like `Service.encode`."""
    facts = service.facts
    with authenticated(request, takes_api_key=takes_api_key) as caller:
        principal = service.access.authorize(caller, Action.GENERATE)
        admit(request, principal)
        num_bytes = min(body_bytes(request), MAX_BODY_BYTES)
        async with service.reading(principal, num_bytes) as parsers:
            body = await read_body(
                request, kind, parsers, max_values=max(MAX_VALUES, 2 * facts.max_model_len)
            )
            asked = cast(ToEncode, body)
            adapter = adapter_of(asked.model or facts.base_model, facts)
            return principal, body, await service.encode(principal, adapter, asked.to_prompt())
