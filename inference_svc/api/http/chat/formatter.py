"""The format of a chat's choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference_svc.api.http.chat.tools import to_deltas
from inference_svc.api.http.response import FINISH_REASONS, Choice
from inference_svc.core import FinishReason
from inference_svc.frontend.output_stream import Delta
from inference_svc.results.base import of_kind
from inference_svc.results.logprobs import PackedLogprobs, TokenLogprobs
from inference_svc.text.pieces import AnyPieces

MIN_LOGPROB = -9999.0
"""JSON has no infinity."""


def prompt_logprobs(scores: PackedLogprobs, pieces: AnyPieces) -> list[dict[str, Any]]:
    """Returns for each token of a prompt, by id, itself and the most likely ones."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = pieces.of(token_id).text
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    columns = (each.tolist() for each in scores[1:])
    found = []
    for token_id, logprob, rank, top_ids, top_logprobs in zip(*columns, strict=True):
        entries = {str(token_id): entry(token_id, logprob, rank)}
        for place, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True)):
            entries.setdefault(str(top_id), entry(top_id, value, place + 1))
        found.append(entries)
    return found


def _reason(reason: FinishReason, *, has_calls: bool) -> str:
    is_call = has_calls and reason is FinishReason.STOP
    return "tool_calls" if is_call else FINISH_REASONS[reason]


class ChatFormatter:
    """See `response.ChoiceFormatter`."""

    logprob_constants: Mapping[str, None] = {"refusal": None}
    scores_in_choice = False

    def __init__(self, index: int, pieces: AnyPieces, includes_ids: bool) -> None:
        self._index = index
        self._pieces = pieces
        self._includes_ids = includes_ids
        self._has_begun = False
        self._has_calls = False

    def full(self, choice: Choice) -> dict[str, Any]:
        assert choice.finish_reason is not None
        calls, text = choice.calls.to_json(), choice.text
        content = text if text or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if choice.thoughts:
            message["reasoning_content"] = choice.thoughts
        if calls:
            message["tool_calls"] = calls
        formatted = {
            "index": self._index,
            "message": message,
            "finish_reason": _reason(choice.finish_reason, has_calls=bool(calls)),
        }
        return formatted | {"token_ids": choice.token_ids} if self._includes_ids else formatted

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        reason = delta.finish_reason
        has_content = delta.text or delta.thoughts or delta.calls
        is_new = has_content or delta.parts or reason or self._includes_ids
        if self._has_begun and not is_new:
            return None
        content: dict[str, Any] = {} if self._has_begun else {"role": "assistant", "content": ""}
        self._has_begun = True
        if delta.thoughts:
            content["reasoning_content"] = delta.thoughts
        if delta.text:
            content["content"] = delta.text
        if delta.calls:
            content["tool_calls"] = to_deltas(delta.calls)
            self._has_calls = True
        formatted = {
            "index": self._index,
            "delta": content,
            "logprobs": self._chunk_logprobs(delta),
            "finish_reason": None if reason is None else _reason(reason, has_calls=self._has_calls),
        }
        return formatted | {"token_ids": delta.token_ids} if self._includes_ids else formatted

    def prompt_logprobs(self, scores: PackedLogprobs) -> list[dict[str, Any]]:
        return prompt_logprobs(scores, self._pieces)

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        return {"content": [self._token(each) for each in tokens]}

    def _chunk_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        tokens = of_kind(delta.parts, TokenLogprobs)
        return {**self.logprobs(tokens), **self.logprob_constants} if tokens else None

    def _token(self, token: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
        return self._entry(token.token_id, token.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._pieces.of(token_id)
        return {
            "token": piece.text,
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(piece.data),
        }
