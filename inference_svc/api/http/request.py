"""What arrives: who calls, and a body that is what it should be."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from inference_svc.api.http.errors import set_known, set_read
from inference_svc.api.service import Caller
from servicekit.errors import InvalidArgument, ServiceError, Unauthenticated

MAX_BODY_BYTES = 4 << 20
"""As of a message over gRPC."""
BODY_SECONDS = 60.0
"""A client that takes longer to send one holds a connection for nothing."""
REQUEST_ID_HEADER = "x-request-id"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
MAX_NAME_CHARS = 100
"""Of a field that the caller made up."""


class Body(BaseModel):
    """Of a request: nothing is converted, nothing is passed over. Unknown fields are looked for
    afterwards, and lists are `fail_fast`: an error for each would take gigabytes of a body of
    nothing else."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


B = TypeVar("B", bound=Body)


@contextmanager
def recognising(request: Request) -> Iterator[Caller]:
    """Who calls, for the gate: whom that does not refuse as unknown is no stranger."""
    host, port = request.client or ("", 0)
    try:
        yield Caller(request.headers.items(), f"http:{host}:{port}")
    except Unauthenticated:
        raise
    except ServiceError:
        set_known(request)
        raise
    set_known(request)


def request_id_of(request: Request) -> str:
    """The caller's own, so that it finds the request in our log; a new one where it gave none, or
    one that cannot be taken."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_request_id(request: Request) -> None:
    """Raises InvalidArgument for one that cannot be taken."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is not None and not _REQUEST_ID.fullmatch(given):
        raise InvalidArgument(
            f"{REQUEST_ID_HEADER} must be 1 to 128 visible ASCII characters",
            subject=REQUEST_ID_HEADER,
        )


async def read_body(request: Request, kind: type[B]) -> B:
    """Raises InvalidArgument naming the field, HTTPException, and ClientDisconnect."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page in a browser cannot send this to other hosts than its own without asking them.
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
        raise InvalidArgument(f"{field}: is not known here", subject=field)
    return body


def find_unknown(body: Body) -> tuple[int | str, ...] | None:
    """Where the first field is that there is not."""
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
    """The first problem."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field, text = _path(problem["loc"]), problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        text = "is missing"
    return InvalidArgument(f"{field or 'the body'}: {text}", subject=field)


def _path(location: tuple[int | str, ...]) -> str:
    """messages[0].role"""
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part[:MAX_NAME_CHARS]}" for part in location
    ]
    return "".join(parts).removeprefix(".")
