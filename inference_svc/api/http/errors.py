"""Errors as HTTP responses in OpenAI's format: one table, and the handlers that use it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from inference_svc.api.http.serving.connections import Connection
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnavailable,
    AdapterUnusable,
    Asleep,
    CannotWake,
    ChatTemplateInvalid,
    CorruptImage,
    DuplicateRequest,
    EngineFailed,
    GrammarRefused,
    ImageFetchFailed,
    ImageNotFound,
    Interrupted,
    NoRoom,
    NoSteps,
    NotFinite,
    OutOfDeviceMemory,
    ProfileRunning,
    QueueFull,
    StoreUnavailable,
    TemplateTimeout,
    TokenizerChanged,
)
from servicekit import errors

CLIENT_CLOSED_REQUEST = 499
"""Never sent: counted where the client disconnected before the response."""

INTERNAL_MESSAGE = "internal error"
"""The text that a caller gets for our bugs; the log has the rest."""


class ErrorStatus(NamedTuple):
    """The HTTP status, and the error's fields `type` and `code`."""

    status: int
    type: str
    code: str


LINGER_BYTES = 8 << 20
LINGER_SECONDS = 1.0
"""How much of an unread body is discarded, and for how long, before its connection closes."""

SHARE_EXCEEDED_SECONDS = 2.0
"""How long a caller that has its share waits to be told so: connections that come again at once
would take a processor for themselves."""

_INVALID = "invalid_request_error"
INTERNAL = ErrorStatus(500, "server_error", "internal_error")

ERROR_STATUSES: dict[type[errors.ServiceError], ErrorStatus] = {
    errors.Unauthenticated: ErrorStatus(401, "authentication_error", "invalid_api_key"),
    errors.PermissionDenied: ErrorStatus(403, "permission_error", "permission_denied"),
    errors.InvalidArgument: ErrorStatus(400, _INVALID, "invalid_argument"),
    errors.ShareExceeded: ErrorStatus(429, "rate_limit_error", "rate_limit_exceeded"),
    TemplateTimeout: ErrorStatus(400, _INVALID, "invalid_argument"),
    GrammarRefused: ErrorStatus(400, _INVALID, "invalid_argument"),
    DuplicateRequest: ErrorStatus(409, _INVALID, "duplicate_request_id"),
    AdapterNotFound: ErrorStatus(404, _INVALID, "model_not_found"),
    ImageNotFound: ErrorStatus(404, _INVALID, "image_not_found"),
    AdapterUnusable: ErrorStatus(400, _INVALID, "adapter_unusable"),
    AdapterUnavailable: ErrorStatus(503, "server_error", "adapter_unavailable"),
    StoreUnavailable: ErrorStatus(503, "server_error", "store_unavailable"),
    TokenizerChanged: ErrorStatus(400, _INVALID, "tokenizer_changed"),
    ChatTemplateInvalid: ErrorStatus(400, _INVALID, "chat_template_invalid"),
    CorruptImage: ErrorStatus(500, "server_error", "corrupt_image"),
    QueueFull: ErrorStatus(429, "rate_limit_error", "rate_limit_exceeded"),
    OutOfDeviceMemory: ErrorStatus(503, "server_error", "out_of_device_memory"),
    NotFinite: ErrorStatus(400, _INVALID, "values_not_finite"),
    NoRoom: ErrorStatus(400, _INVALID, "no_room"),
    ImageFetchFailed: ErrorStatus(424, _INVALID, "image_fetch_failed"),
    Interrupted: ErrorStatus(409, _INVALID, "interrupted"),
    CannotWake: ErrorStatus(500, "server_error", "cannot_wake"),
    Asleep: ErrorStatus(503, "server_error", "asleep"),
    ProfileRunning: ErrorStatus(409, _INVALID, "profile_running"),
    NoSteps: ErrorStatus(504, "server_error", "no_steps"),
    errors.Draining: ErrorStatus(503, "server_error", "draining"),
    EngineFailed: ErrorStatus(503, "server_error", "engine_failed"),
}
"""Every error that a request ends with; any other is a bug. The codes are our reasons, except for
the two that OpenAI's clients know. Those clients retry some statuses, and gateways take them for a
broken replica: only temporary errors of this server have one, not errors of other hosts."""

PROTOCOL_CODES: dict[int, str] = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    501: "not_implemented",
}
"""Codes of errors in HTTP itself."""

API_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/classify",
    "/pooling",
    "/embed",
    "/embed_all",
    "/predict",
    "/similarity",
    "/v1/models",
    "/tokenize",
    "/detokenize",
)
_ABOUT_ADAPTER = (AdapterNotFound, AdapterUnusable, AdapterUnavailable, NotFinite)

Names = Mapping[str, str]
"""A route's own names for the subjects of errors."""
ErrorForm = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
"""Makes a route's own form of an error from its status and OpenAI's form."""


def as_it_is(status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an error in OpenAI's form."""
    return body


def error_object(error: Exception, names: Names) -> tuple[ErrorStatus, dict[str, Any]]:
    """Returns the status and {"error": {...}}."""
    status, message, param = _status(error), INTERNAL_MESSAGE, None
    if isinstance(error, errors.ServiceError) and status is not INTERNAL:
        message = error.message
        param = _param(error, names)
        if isinstance(error, AdapterNotFound) and param == "model":
            message = f"{message}; GET /v1/models lists the models of this server"
    body = {"message": message, "type": status.type, "param": param, "code": status.code}
    return status, {"error": body}


def _status(error: Exception) -> ErrorStatus:
    if not isinstance(error, errors.ServiceError):
        return INTERNAL
    return ERROR_STATUSES.get(type(error), INTERNAL)


def _param(error: errors.ServiceError, names: Names) -> str | None:
    if isinstance(error, _ABOUT_ADAPTER):
        return names.get("adapter")
    if isinstance(error, errors.InvalidArgument | ImageFetchFailed):
        field, bracket, place = error.subject.partition("[")
        return f"{names.get(field, field)}{bracket}{place}" or None
    return None


# --- the state of a request ---------------------------------------------------------------------


def set_names(request: Request, names: Names, form: ErrorForm = as_it_is) -> None:
    """Sets the names of the request's route, and the form of its errors; the first thing that a
    handler does."""
    request.state.names = names
    request.state.error_form = form


def set_read(request: Request) -> None:
    """Marks the body as fully read."""
    request.state.is_read = True


def set_authenticated(request: Request) -> None:
    request.state.is_authenticated = True


def is_authenticated(scope: Scope) -> bool:
    return bool(scope.get("state", {}).get("is_authenticated"))


def set_error(scope: Scope, error: Exception) -> None:
    """Records that the request failed, whether or not a response had begun."""
    scope.setdefault("state", {})["error"] = error


def error_of(scope: Scope) -> Exception | None:
    error: Exception | None = scope.get("state", {}).get("error")
    return error


def forget_error(scope: Scope) -> None:
    """Lets go of a request's error once it is counted, because holders of the scope would keep
    it."""
    error = scope.get("state", {}).pop("error", None)
    if isinstance(error, errors.ServiceError):
        _release_frames(error)


def _release_frames(error: BaseException) -> None:
    """Lets go of the frames that the error came through, and its causes' frames: they hold the
    request's body, and tasks that raised the error in turn hold it, until a collection of cycles.
    """
    link: BaseException | None = error
    while link is not None:
        next_link = link.__context__
        link.__traceback__ = link.__context__ = link.__cause__ = None
        link = next_link


def set_disconnected(scope: Scope) -> None:
    """Records that the client disconnected before the end of the response."""
    scope.setdefault("state", {})["is_disconnected"] = True


def status_of(scope: Scope, sent: int | None) -> int:
    """Returns how the request ended; a response that was `sent` may have begun before it failed."""
    error = error_of(scope)
    if error is not None:
        return _status(error).status
    is_disconnected = scope.get("state", {}).get("is_disconnected", False)
    return CLIENT_CLOSED_REQUEST if sent is None or is_disconnected else sent


# --- handlers -----------------------------------------------------------------------------------


async def handle_error(request: Request, error: Exception) -> Response:
    """Responds to any error that is raised before a response has begun. Only bugs keep where they
    were raised, for the log."""
    if isinstance(error, (ClientDisconnect, HTTPException, errors.ServiceError)):
        _release_frames(error)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(error, HTTPException):
        headers = error.headers or {}
        return _respond(request, error.status_code, _protocol_error(error, headers), headers)
    if isinstance(error, errors.ShareExceeded):
        await asyncio.sleep(SHARE_EXCEEDED_SECONDS)
    status, body = error_object(error, getattr(request.state, "names", {}))
    set_error(request.scope, error)
    headers = {}
    if isinstance(error, errors.ServiceError) and error.retry_after_s > 0:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if status.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _respond(request, status.status, body, headers)


def _protocol_error(error: HTTPException, headers: Mapping[str, str]) -> dict[str, Any]:
    code, message = PROTOCOL_CODES.get(error.status_code, "invalid_argument"), error.detail
    if error.status_code == 404:
        message = f"there is nothing at this path; the API is at {', '.join(API_PATHS)}"
    elif error.status_code == 405:
        message = f"this path takes {headers.get('Allow', 'another method')} only"
    body = {"message": message, "type": _INVALID, "param": None, "code": code}
    return {"error": body}


def _respond(
    request: Request, status: int, body: dict[str, Any], headers: Mapping[str, str]
) -> Response:
    is_read = getattr(request.state, "is_read", False) or request.method in ("GET", "HEAD")
    response_type = JSONResponse if is_read else UnreadBodyResponse
    form: ErrorForm = getattr(request.state, "error_form", as_it_is)
    return response_type(form(status, body), status, headers)


class UnreadBodyResponse(JSONResponse):
    """Closes the connection of a request whose body was not read. Bytes that the client still sends
    are discarded for a while, because closing at once would reset the connection, and the client
    might never see the response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        connection: Connection = scope["state"]["connection"]
        is_known = is_authenticated(scope)
        place = connection.linger(is_known)
        if place is not None:
            reading = connection.reading_body() if is_known else contextlib.nullcontext()
            with place, reading, contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    num_bytes, is_over = 0, False
    while not is_over and num_bytes < LINGER_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        is_over = not message.get("more_body", False)
