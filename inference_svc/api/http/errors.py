"""Errors as HTTP answers in OpenAI's shape: one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from inference_svc.api.http.refusing import UnreadRefusal
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnavailable,
    AdapterUnusable,
    CorruptImage,
    DuplicateRequest,
    EngineFailed,
    NoRoom,
    NoSteps,
    ProfileRunning,
    QueueFull,
    StoreUnavailable,
)
from servicekit import errors

CLIENT_GONE = 499
"""Never sent: what is counted where the client left before it had an answer."""

INTERNAL_MESSAGE = "internal error"
"""All that a caller learns of our bugs; the log has the rest."""


class Answer(NamedTuple):
    """`kind` and `code` are the fields `type` and `code` of the error."""

    status: int
    kind: str
    code: str


_INVALID = "invalid_request_error"
INTERNAL = Answer(500, "server_error", "internal_error")

ANSWERS: dict[type[errors.ServiceError], Answer] = {
    errors.Unauthenticated: Answer(401, "authentication_error", "invalid_api_key"),
    errors.PermissionDenied: Answer(403, "permission_error", "permission_denied"),
    errors.InvalidArgument: Answer(400, _INVALID, "invalid_argument"),
    DuplicateRequest: Answer(409, _INVALID, "duplicate_request_id"),
    AdapterNotFound: Answer(404, _INVALID, "model_not_found"),
    AdapterUnusable: Answer(400, _INVALID, "adapter_unusable"),
    AdapterUnavailable: Answer(503, "server_error", "adapter_unavailable"),
    StoreUnavailable: Answer(503, "server_error", "store_unavailable"),
    CorruptImage: Answer(500, "server_error", "corrupt_image"),
    QueueFull: Answer(429, "rate_limit_error", "rate_limit_exceeded"),
    NoRoom: Answer(400, _INVALID, "no_room"),
    ProfileRunning: Answer(409, _INVALID, "profile_running"),
    NoSteps: Answer(504, "server_error", "no_steps"),
    errors.Draining: Answer(503, "server_error", "draining"),
    EngineFailed: INTERNAL,
}
"""Every error that a request ends with; what is not here is a bug. The codes are our reasons, but
for those two that clients of OpenAI look for. What waiting cannot mend is none that they try
again."""

PROTOCOL: dict[int, str] = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
}
"""Codes of what is wrong before a request means anything."""

_ABOUT_ADAPTER = (AdapterNotFound, AdapterUnusable, AdapterUnavailable)

Names = Mapping[str, str]
"""What a route calls the subjects of errors, where it has other names for them."""


def error_object(error: Exception, names: Names) -> tuple[Answer, dict[str, Any]]:
    """{"error": {...}}, and what goes with it."""
    answer, message, param = _answer(error), INTERNAL_MESSAGE, None
    if isinstance(error, errors.ServiceError) and answer is not INTERNAL:
        message = error.message
        param = _param(error, names)
    body = {"message": message, "type": answer.kind, "param": param, "code": answer.code}
    return answer, {"error": body}


def _answer(error: Exception) -> Answer:
    if not isinstance(error, errors.ServiceError):
        return INTERNAL
    return ANSWERS.get(type(error), INTERNAL)


def _param(error: errors.ServiceError, names: Names) -> str | None:
    if isinstance(error, _ABOUT_ADAPTER):
        return names.get("adapter")
    if isinstance(error, errors.InvalidArgument):
        return names.get(error.subject, error.subject) or None
    return None


# --- what is noted of a request -----------------------------------------------------------------


def set_names(request: Request, names: Names) -> None:
    """Of the request's route: the first thing that a handler does."""
    request.state.names = names


def set_read(request: Request) -> None:
    """Nothing of the body is left on the connection."""
    request.state.is_read = True


def set_known(request: Request) -> None:
    """Its caller is no stranger."""
    request.state.is_known = True


def is_known(scope: Scope) -> bool:
    return bool(scope.get("state", {}).get("is_known"))


def set_error(scope: Scope, error: Exception) -> None:
    """It failed, whether or not an answer had begun."""
    scope.setdefault("state", {})["error"] = error


def error_of(scope: Scope) -> Exception | None:
    error: Exception | None = scope.get("state", {}).get("error")
    return error


def set_left(scope: Scope) -> None:
    """Its client left before the answer's end."""
    scope.setdefault("state", {})["has_left"] = True


def status_of(scope: Scope, sent: int | None) -> int:
    """How it ended, which its answer, if one was `sent`, may have begun too early to tell."""
    error = error_of(scope)
    if error is not None:
        return _answer(error).status
    has_left = scope.get("state", {}).get("has_left", False)
    return CLIENT_GONE if sent is None or has_left else sent


# --- handlers -----------------------------------------------------------------------------------


async def answer_error(request: Request, error: Exception) -> Response:
    """Of everything that is raised before an answer has begun."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        return _respond(request, error.status_code, _protocol_error(error), error.headers or {})
    answer, body = error_object(error, getattr(request.state, "names", {}))
    set_error(request.scope, error)
    headers = {}
    if isinstance(error, errors.ServiceError) and error.retry_after_s > 0:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _respond(request, answer.status, body, headers)


def _protocol_error(error: HTTPException) -> dict[str, Any]:
    code = PROTOCOL.get(error.status_code, "invalid_argument")
    body = {"message": error.detail, "type": _INVALID, "param": None, "code": code}
    return {"error": body}


def _respond(
    request: Request, status: int, body: dict[str, Any], headers: Mapping[str, str]
) -> Response:
    is_read = getattr(request.state, "is_read", False) or request.method in ("GET", "HEAD")
    kind = JSONResponse if is_read else UnreadRefusal
    return kind(body, status, headers)
