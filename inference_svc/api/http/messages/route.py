"""A request to /v1/messages, from its body to its answer; and the count of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.http.errors import set_names
from inference_svc.api.http.messages.answer import Blocks
from inference_svc.api.http.messages.body import CountBody, Messages
from inference_svc.api.http.models import label_of
from inference_svc.api.http.responses.route import AnswerRoute
from inference_svc.api.http.tokenizer import encoded

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors, by status."""


def to_error(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an error in Anthropic's form, made of OpenAI's."""
    default = "invalid_request_error" if status < 500 else "api_error"
    found = body["error"]
    fields = {name: found[name] for name in ("param", "code") if found[name] is not None}
    error = {"type": TYPES.get(status, default), "message": found["message"], **fields}
    return {"type": "error", "error": error}


class MessagesRoute(AnswerRoute):
    endpoint = Messages
    takes_api_key = True

    def error_form(self, status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return to_error(status, body)

    async def count(self, request: Request) -> Response:
        """Returns how many tokens a prompt has."""
        set_names(request, Messages.names, to_error)
        _, _, (token_ids, _) = await encoded(self._service, request, CountBody, takes_api_key=True)
        return JSONResponse({"input_tokens": len(token_ids)})

    def items(self, stream: GenerateStream, endpoint: Messages) -> Blocks:
        head = {
            "id": f"msg_{stream.call.request_id}",
            "type": "message",
            "role": "assistant",
            "model": label_of(stream.binding, stream.principal, self._service.facts),
        }
        [request] = stream.requests
        return Blocks(
            head,
            len(request.prompt_token_ids),
            stream.call.sampling.max_tokens,
            hides_thoughts=endpoint.hides_thoughts,
        )
