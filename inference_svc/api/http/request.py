"""Request bodies and headers: reading and checking them."""

from __future__ import annotations

import asyncio
import difflib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from inference_svc.api.access import Caller
from inference_svc.api.generate_call import MAX_MESSAGES
from inference_svc.api.http.errors import set_authenticated, set_read
from inference_svc.api.http.serving.connections import Connection
from inference_svc.core import Principal
from servicekit.errors import InvalidArgument, Unauthenticated

MAX_BODY_BYTES = 4 << 20
"""The same limit as of a gRPC message."""
BODY_SECONDS = 60.0
BODY_GRACE_SECONDS, MIN_BODY_BYTES_PER_S = 10.0, 64 << 10
"""A body arrives within the grace, and at this rate from then on: a slower client would hold memory
for nothing."""
INLINE_BODY_BYTES = 64 << 10
"""Longer bodies are parsed off the event loop."""
MAX_VALUES = 1 << 18
"""Of a body, where the context is not longer: the token ids of its prompts, and little else. The
parser lets no other thread run, and takes a twentieth of a second for as many."""
MAX_CONTAINERS, MAX_STRINGS = 2 * MAX_MESSAGES, 8 * MAX_MESSAGES
MAX_KEYS, MAX_KEYS_PER_CONTAINER = 2048, 4
"""Of a body, and in addition for each object and list: an unknown key costs as much as an error."""
REQUEST_ID_HEADER = "x-request-id"

MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
MAX_NAME_CHARS = 100
"""The most of an unknown field's name in an error message."""


class Body(BaseModel):
    """A request body: no type is converted, no field ignored. Lists are `fail_fast`: an error
    object for each item of a large bad body would take hundreds of megabytes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


B = TypeVar("B", bound=Body)


class IncomingBody:
    """A request whose body is to be read; see `service.IncomingCall`. Subclasses set `adapter`."""

    def __init__(self, request: Request) -> None:
        self.request_id = request_id_of(request)
        self.adapter = ""
        self.num_read = 0
        self._request = request
        self._is_read = asyncio.Event()

    def accept(self, caller: Principal) -> int:
        check_request_id(self._request)
        admit(self._request, caller)
        return min(body_bytes(self._request), MAX_BODY_BYTES)

    async def read_as(self, kind: type[B], parsers: Executor, max_values: int) -> B:
        """Returns the body. Raises like `read_body`."""
        self.num_read = body_bytes(self._request)  # a refused body is read too, and discarded
        return await read_body(self._request, kind, parsers, max_values, self._note_read)

    def _note_read(self, num_bytes: int) -> None:
        self.num_read = num_bytes
        self._is_read.set()

    async def receive_after_body(self) -> Message:
        """Receives the message after the body: the client's disconnect."""
        await self._is_read.wait()
        return await self._request.receive()


@contextmanager
def authenticated(request: Request, *, takes_api_key: bool = False) -> Iterator[Caller]:
    """Yields the caller, which the context authenticates first; unless it raises Unauthenticated,
    the request is marked as authenticated. With `takes_api_key` its token may be in the header of
    Anthropic's clients."""
    host, port = request.client or ("", 0)
    headers = request.headers.items()
    key = request.headers.get("x-api-key")
    if takes_api_key and key is not None and "authorization" not in request.headers:
        headers = [*headers, ("authorization", f"Bearer {key}")]
    try:
        yield Caller(headers, f"http:{host}:{port}")
    except Unauthenticated:
        raise
    except BaseException:
        set_authenticated(request)
        raise
    set_authenticated(request)


def admit(request: Request, caller: Principal) -> None:
    """Counts the request's connection against the caller's share. Raises ShareExceeded."""
    connection_of(request).admit(caller.account)


def connection_of(request: Request) -> Connection:
    found: Connection = request.state.connection
    return found


def request_id_of(request: Request) -> str:
    """Returns the caller's id, so that it finds the request in our log; a new one if it gave none,
    or an invalid one."""
    request_id = request.headers.get(REQUEST_ID_HEADER, "")
    return request_id if is_request_id(request_id) else uuid.uuid4().hex


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


def check_request_id(request: Request) -> None:
    """Raises InvalidArgument for an invalid id."""
    request_id = request.headers.get(REQUEST_ID_HEADER)
    if request_id is not None and not is_request_id(request_id):
        raise InvalidArgument(
            f"{REQUEST_ID_HEADER} must be 1 to {MAX_REQUEST_ID_CHARS} visible ASCII characters",
            subject=REQUEST_ID_HEADER,
        )


def body_bytes(request: Request) -> int:
    """Returns how long the body is said to be, or may be; for a body that is too long, one byte too
    many."""
    length = request.headers.get("content-length")
    if length is None:
        return MAX_BODY_BYTES if "transfer-encoding" in request.headers else 0
    if not length.isdecimal() or len(length) > 20:
        return MAX_BODY_BYTES + 1
    return min(int(length), MAX_BODY_BYTES + 1)


async def read_body(
    request: Request,
    kind: type[B],
    parsers: Executor | None = None,
    max_values: int = MAX_VALUES,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> B:
    """Long bodies are parsed by one of the `parsers`; without them there are none. `on_read` is
    called in between with the length. Raises InvalidArgument naming the field, HTTPException, and
    ClientDisconnect."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser sends this type to other origins only after a preflight request.
    if media_type != "application/json":
        raise HTTPException(415, "content-type must be application/json")
    max_bytes = INLINE_BODY_BYTES if parsers is None else MAX_BODY_BYTES
    if body_bytes(request) > max_bytes and "content-length" in request.headers:
        raise _too_large(max_bytes)
    with connection_of(request).reading_body():
        data = await _read(request, max_bytes)
    set_read(request)
    on_read(len(data))
    if parsers is None or len(data) <= INLINE_BODY_BYTES:
        return parse_body(data, kind, max_values)
    parsing = asyncio.wrap_future(parsers.submit(_parse_in_turn, data, kind, max_values))
    del data  # the parser alone holds it
    return await parsing


def _parse_in_turn(data: bytearray, kind: type[B], max_values: int) -> B:
    with _PARSING.turn():
        return parse_body(data, kind, max_values)


class Turns:
    """Turns of work that lets no other thread of the interpreter run: one at a time, and after each
    the others have as much time as it took. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_s = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            start_s = time.thread_time()
            try:
                yield
            finally:
                self._next_s = time.monotonic() + time.thread_time() - start_s


_PARSING = Turns()
"""All of the process, as its interpreter is."""


def parse_body(data: bytes | bytearray, kind: type[B], max_values: int = MAX_VALUES) -> B:
    """Raises InvalidArgument naming the field."""
    _check_structure(data, max_values)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _to_invalid_request(error, kind) from None


def _check_structure(data: bytes | bytearray, max_values: int) -> None:
    """Raises InvalidArgument for a body of too many parts, which would take far more memory than
    its text and, in one call of the parser, stop every other thread."""
    if (
        _num_containers(data) <= MAX_CONTAINERS
        and data.count(b":") <= MAX_KEYS
        and data.count(b",") <= max_values
        and data.count(b'"') <= 2 * MAX_STRINGS
    ):
        return  # few even with the characters in strings, so few without
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    _check_count(data.count(b'"') // 2, MAX_STRINGS, "strings")
    data = b"".join(data.split(b'"')[::2])  # the parts outside of strings
    num_containers = _num_containers(data)
    _check_count(num_containers, MAX_CONTAINERS, "objects and lists")
    max_keys = MAX_KEYS + MAX_KEYS_PER_CONTAINER * num_containers
    _check_count(data.count(b":"), max_keys, "keys")
    _check_count(data.count(b","), max_values, "values")


def _num_containers(data: bytes | bytearray) -> int:
    return data.count(b"{") + data.count(b"[")


def _check_count(count: int, limit: int, parts: str) -> None:
    if count > limit:
        raise InvalidArgument(f"the body must have at most {limit} {parts}")


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body must have at most {max_bytes} bytes")


async def _read(request: Request, max_bytes: int) -> bytearray:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_GRACE_SECONDS) as limit:
            async for part in request.stream():
                data += part
                if len(data) > max_bytes:
                    raise _too_large(max_bytes)
                allowed_s = BODY_GRACE_SECONDS + len(data) / MIN_BODY_BYTES_PER_S
                limit.reschedule(start_s + min(allowed_s, BODY_SECONDS))
    except TimeoutError:
        raise HTTPException(
            408,
            f"the body must arrive within {BODY_GRACE_SECONDS:g} s and "
            f"{MIN_BODY_BYTES_PER_S >> 10} KiB/s from then on, at most {BODY_SECONDS:g} s in all",
        ) from None
    return data


def _to_invalid_request(error: ValidationError, kind: type[Body]) -> InvalidArgument:
    """Returns the first problem, in the words of JSON."""
    problem = error.errors(include_url=False, include_input=False)[0]
    field, context = _path(problem["loc"]), problem.get("ctx", {})
    if problem["type"] == "value_error":  # of our own checks
        text = problem["msg"].removeprefix("Value error, ")
    elif context.get("max_length") == 0:
        text = "must be empty: it has no effect here"
    elif context.get("min_length") == 1:
        text = "must not be empty"
    else:
        text = _RULES.get(problem["type"], "is not valid").format_map(_as_json(context))
        if problem["type"] == "extra_forbidden":
            text += _hint(kind, problem["loc"])
    return InvalidArgument(f"{field or 'the body'}: {text}", subject=field)


_RULES = {
    "missing": "is missing",
    "extra_forbidden": "unknown field",
    "json_invalid": "is not JSON: {error}",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "none_required": "must be null",
    "union_tag_invalid": "must have one of the types {expected_tags}",
    "union_tag_not_found": "must have a type",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "too_long": "must have at most {max_length} items",
    "string_too_long": "must have at most {max_length} characters",
}
"""The meaning of each kind of problem, by the validator's name of it."""


def _hint(kind: type[Body], location: tuple[int | str, ...]) -> str:
    """Returns the name of a field that the last name of a location is close to, as a question."""
    *parents, last = location
    kinds = [kind]
    for name in parents:
        fields = [each.model_fields[name] for each in kinds if name in each.model_fields]
        kinds = [inner for field in fields for inner in _bodies(field.annotation)] or kinds
    known = [field.alias or name for each in kinds for name, field in each.model_fields.items()]
    close = difflib.get_close_matches(str(last)[:MAX_NAME_CHARS], known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _bodies(annotation: Any) -> list[type[Body]]:
    """Returns the bodies that values of a type may have."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return [annotation]
    return [found for each in get_args(annotation) for found in _bodies(each)]


def _as_json(context: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the details of a problem, with values as JSON writes them."""
    expected = str(context.get("expected", ""))
    for python, written in (("False", "false"), ("True", "true"), ("'", '"')):
        expected = expected.replace(python, written)
    return {**context, "expected": expected}


def _path(location: tuple[int | str, ...]) -> str:
    """Formats a path like messages[0].role."""
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part[:MAX_NAME_CHARS]}" for part in location
    ]
    return "".join(parts).removeprefix(".")
