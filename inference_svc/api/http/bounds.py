"""How much one answer may tell: logprobs are many times what they are told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inference_svc.core import Request
from servicekit.errors import InvalidArgument

MAX_LOGPROBS_TOLD = 1 << 18
"""Of one answer: of each token its own, and those of its alternatives. They are about 20 MB of
JSON, and a second and a half of a processor."""


def bounded(requests: Sequence[Request], limit_field: str) -> list[Request]:
    """The requests of one answer, which ask for equally many logprobs, if it can be told. Raises
    InvalidArgument naming the caller's field for the number of tokens. Where that is "", as there
    was none, each request ends where its part of the bound does."""
    per_token = 1 + (requests[0].sampling.logprobs or 0)
    num_tokens = sum(request.sampling.max_tokens for request in requests)
    if requests[0].sampling.logprobs is None or num_tokens * per_token <= MAX_LOGPROBS_TOLD:
        return list(requests)
    if limit_field:
        raise InvalidArgument(
            f"{limit_field}: up to {num_tokens} tokens of all choices, with {per_token} logprobs "
            f"each, are more than the {MAX_LOGPROBS_TOLD} of an answer",
            subject=limit_field,
        )
    room = MAX_LOGPROBS_TOLD // (per_token * len(requests))
    return [_shortened(request, room) for request in requests]


def _shortened(request: Request, max_tokens: int) -> Request:
    sampling = request.sampling
    return replace(
        request,
        sampling=replace(
            sampling,
            max_tokens=min(sampling.max_tokens, max_tokens),
            min_tokens=min(sampling.min_tokens, max_tokens),
        ),
    )
