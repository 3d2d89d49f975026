"""The blocks of an answer: thoughts, texts, and calls; as events, and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from inference_svc.api.http.sse import to_json
from inference_svc.core import FinishReason
from inference_svc.errors import Interrupted
from inference_svc.frontend.output_stream import Delta
from inference_svc.text.answers.scanner import CallPiece, Said, Thought

PIECES = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a piece of each kind of block, and the field of its text."""


class Blocks:
    """Makes events of deltas, and keeps the blocks. `head` are the answer's first fields;
    `num_prompt` tokens has its prompt, and `max_tokens` it may have. With `hides_thoughts` their
    blocks are empty."""

    def __init__(
        self,
        head: Mapping[str, Any],
        num_prompt: int,
        max_tokens: int,
        *,
        hides_thoughts: bool = False,
    ) -> None:
        self._hides_thoughts = hides_thoughts
        self._head = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
        self._usage: dict[str, Any] = {"input_tokens": num_prompt, "output_tokens": 0}
        self._max_tokens = max_tokens
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """The text of the open block, in pieces."""
        self._error = ""
        """Why the arguments of the open call are no JSON object."""
        self._is_open = False

    def begin(self) -> Iterator[bytes]:
        message = {**self._head, "usage": self._usage}
        yield _event("message_start", message=message)

    def add(self, delta: Delta) -> Iterator[bytes]:
        """Yields the events of a delta."""
        for piece in delta.in_order:
            if isinstance(piece, Thought):
                yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                if not self._hides_thoughts:
                    yield self._piece(piece.text)
            elif isinstance(piece, Said):
                yield from self._open({"type": "text", "text": ""})
                yield self._piece(piece.text)
            else:
                yield from self._call(piece)

    def _call(self, piece: CallPiece) -> Iterator[bytes]:
        if piece.name:
            call = {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}
            yield from self._open(call)
        if piece.arguments:
            yield self._piece(piece.arguments)
        self._error = piece.error

    def end(self, last: Delta) -> Iterator[bytes]:
        """Yields the last events. Raises Interrupted for an answer that was ended from outside."""
        yield from self._close()
        reason = self._reason(last)
        stop = {"stop_reason": reason, "stop_sequence": last.stop or None}
        if last.usage is not None:
            cached = last.usage.cached_prompt_tokens
            self._usage = {
                "input_tokens": last.usage.prompt_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": last.usage.completion_tokens,
            }
        self._head |= {"content": self._blocks, **stop, "usage": self._usage}
        yield _event("message_delta", delta=stop, usage=self._usage)
        yield _event("message_stop")

    def whole(self) -> dict[str, Any]:
        return self._head

    def _reason(self, last: Delta) -> str:
        if last.finish_reason is FinishReason.ABORTED:
            raise Interrupted("the answer was ended before its last token: send it again")
        if last.finish_reason is FinishReason.LENGTH:
            num_tokens = 0 if last.usage is None else last.usage.completion_tokens
            is_full = num_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if last.stop:
            return "stop_sequence"
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        return "tool_use" if has_calls else "end_turn"

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        """Opens a block, unless one of its kind is open; a call always is another one."""
        kind = block["type"]
        if self._is_open and self._blocks[-1]["type"] == kind and kind != "tool_use":
            return
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield self._of_block("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        block, text = self._blocks[-1], "".join(self._texts)
        self._texts.clear()
        wrong: dict[str, Any] = {}
        if block["type"] != "tool_use":
            block[PIECES[block["type"]][1]] = text
        elif error := self._error or _unwritable(text):
            wrong = {"input_error": error}
            block |= {"input_text": text, **wrong}
        else:
            block["input"] = json.loads(text)
        self._error = ""
        yield self._of_block("content_block_stop", **wrong)

    def _piece(self, text: str) -> bytes:
        self._texts.append(text)
        kind, field = PIECES[self._blocks[-1]["type"]]
        return self._of_block("content_block_delta", delta={"type": kind, field: text})

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, index=len(self._blocks) - 1, **fields)


def _unwritable(arguments: str) -> str:
    """Returns why a call's arguments, which are JSON, cannot be written as a part of other JSON; ""
    if they can: they may have half of a character, or a number that is too large."""
    try:
        to_json(json.loads(arguments)).encode()
    except (ValueError, RecursionError) as error:
        return f"the arguments cannot be written as JSON again: {error}"
    return ""


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields})}\n\n".encode()
