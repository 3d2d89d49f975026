"""Request bodies and headers: reading and checking them, and the fields that all generating routes
share."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from inference_svc.api.generate_call import (
    MAX_ID_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MIN_TEMPERATURE,
    GenerateCall,
    random_seed,
)
from inference_svc.api.http.errors import set_authenticated, set_read
from inference_svc.api.service import Caller
from inference_svc.core import SamplingParams
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument, Unauthenticated

MAX_BODY_BYTES = 4 << 20
"""The same limit as of a gRPC message."""
BODY_SECONDS = 60.0
"""A slower client would hold a connection for nothing."""
REQUEST_ID_HEADER = "x-request-id"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
MAX_NAME_CHARS = 100
"""The most of an unknown field's name in an error message."""


class Body(BaseModel):
    """A request body: no type is converted, no field ignored. Unknown fields are searched for after
    validation, and lists are `fail_fast`: an error object for each item of a large bad body would
    take gigabytes."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


B = TypeVar("B", bound=Body)


@contextmanager
def authenticated(request: Request) -> Iterator[Caller]:
    """Yields the caller, which the context authenticates first; unless it raises Unauthenticated,
    the request is marked as authenticated."""
    host, port = request.client or ("", 0)
    try:
        yield Caller(request.headers.items(), f"http:{host}:{port}")
    except Unauthenticated:
        raise
    except BaseException:
        set_authenticated(request)
        raise
    set_authenticated(request)


def request_id_of(request: Request) -> str:
    """Returns the caller's id, so that it finds the request in our log; a new one if it gave none,
    or an invalid one."""
    request_id = request.headers.get(REQUEST_ID_HEADER, "")
    return request_id if _REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex


def check_request_id(request: Request) -> None:
    """Raises InvalidArgument for an invalid id."""
    request_id = request.headers.get(REQUEST_ID_HEADER)
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument(
            f"{REQUEST_ID_HEADER} must be 1 to 128 visible ASCII characters",
            subject=REQUEST_ID_HEADER,
        )


async def read_body(request: Request, kind: type[B]) -> B:
    """Raises InvalidArgument naming the field, HTTPException, and ClientDisconnect."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser sends this type to other origins only after a preflight request.
    if media_type != "application/json":
        raise HTTPException(415, "content-type must be application/json")
    data = await _read(request)
    set_read(request)
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _to_invalid_request(error) from None
    unknown = find_unknown(body)
    if unknown is not None:
        field = _path(unknown)
        raise InvalidArgument(f"{field}: unknown field", subject=field)
    return body


def find_unknown(body: Body) -> tuple[int | str, ...] | None:
    """Returns the path of the first unknown field."""
    for name in body.model_extra or ():
        return (name,)
    for name in type(body).model_fields:
        value = getattr(body, name)
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, Body) and (found := find_unknown(each)) is not None:
                return (name, *((index,) if isinstance(value, list) else ()), *found)
    return None


async def _read(request: Request) -> bytes:
    too_large = HTTPException(413, f"the body must have at most {MAX_BODY_BYTES} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the body took longer than {BODY_SECONDS:g} s") from None
    return bytes(data)


def _to_invalid_request(error: ValidationError) -> InvalidArgument:
    """Returns the first problem."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field, text = _path(problem["loc"]), problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        text = "is missing"
    return InvalidArgument(f"{field or 'the body'}: {text}", subject=field)


def _path(location: tuple[int | str, ...]) -> str:
    """Formats a path like messages[0].role."""
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part[:MAX_NAME_CHARS]}" for part in location
    ]
    return "".join(parts).removeprefix(".")


# --- fields of the generating routes --------------------------------------------------------------

MAX_CHOICES = 128
"""Choices of one request, for all its prompts together."""
MAX_RESPONSE_LOGPROBS = 1 << 18
"""Logprobs of one response: of each token its own, and those of its alternatives. They are about
20 MB of JSON, and a second and a half of a processor."""


def _greedy_or(temperature: float | None) -> float | None:
    """OpenAI allows any value from 0 on; below our minimum sampling is greedy in effect."""
    is_small = temperature is not None and 0 < temperature < MIN_TEMPERATURE
    return 0.0 if is_small else temperature


def _to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Body):
    """The fields that both routes have; null means absent."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: (
        Annotated[
            list[str], Field(fail_fast=True), Field(max_length=MAX_STOPS), BeforeValidator(_to_list)
        ]
        | None
    ) = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # Extensions, by vLLM's names.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True), Field(max_length=MAX_STOP_TOKEN_IDS)] | None
    ) = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    return_token_ids: bool | None = None
    min_revision: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None

    # Accepted, without effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None

    # Accepted with values that change nothing.
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    def to_sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Returns parameters whose ranges are not checked yet."""
        fields = {
            "temperature": _greedy_or(self.temperature),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
        }
        present: dict[str, Any] = {name: v for name, v in fields.items() if v is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            top_k=max(self.top_k or 0, 0),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **{"seed": random_seed(), **present},
        )

    def to_call(
        self, request_id: str, adapter: str, prompts: tuple[Prompt, ...], sampling: SamplingParams
    ) -> GenerateCall:
        return GenerateCall(
            request_id=request_id,
            adapter=adapter,
            prompts=prompts,
            sampling=sampling,
            min_revision=self.min_revision or 0,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            num_choices=self.n or 1,
            adapter_field="model",
            max_tokens_field=self.max_tokens_field,
            max_logprobs=MAX_RESPONSE_LOGPROBS,
            is_id_unique=False,
        )

    @property
    def max_tokens_field(self) -> str:
        """The field that limits the number of tokens; "" if the caller set none."""
        return "" if self.max_tokens is None else "max_tokens"

    def check_streaming(self) -> None:
        """Raises InvalidArgument."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options: only with stream set", subject="stream_options")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
