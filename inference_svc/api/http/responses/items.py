"""The items of an answer: thoughts, a message, and calls; as events, and whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from inference_svc.api.http.sse import to_json
from inference_svc.core import FinishReason
from inference_svc.engine.transport.messages import Usage
from inference_svc.frontend.output_stream import Delta
from inference_svc.text.answers.scanner import CallPiece, Said, Thought

Event = dict[str, Any]


class Items:
    """Makes events of deltas, and keeps the items. `head` are the answer's first fields."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = dict(head)
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """The text of the open item, in pieces."""
        self._is_open = False
        self._num_events = 0
        self._num_thoughts = 0

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def add(self, delta: Delta) -> Iterator[bytes]:
        """Yields the events of a delta."""
        if delta.thoughts and not delta.text and not delta.calls:
            self._num_thoughts += len(delta.token_ids)
        for piece in delta.in_order:
            if isinstance(piece, Thought):
                yield from self._open("reasoning")
                yield self._piece("response.reasoning_text.delta", piece.text, content_index=0)
            elif isinstance(piece, Said):
                yield from self._open("message")
                yield self._piece(
                    "response.output_text.delta", piece.text, content_index=0, logprobs=[]
                )
            else:
                yield from self._call(piece)

    def _call(self, piece: CallPiece) -> Iterator[bytes]:
        if piece.name:
            yield from self._open("function_call", name=piece.name, call_id=piece.call_id)
        if piece.error:
            self._items[-1]["arguments_error"] = piece.error
        if piece.arguments:
            yield self._piece("response.function_call_arguments.delta", piece.arguments)

    def end(self, last: Delta) -> Iterator[bytes]:
        """Yields the last events."""
        reason = last.finish_reason
        assert reason is not None
        yield from self._close("completed" if reason is FinishReason.STOP else "incomplete")
        self._finish(reason, last.usage)
        kind = "completed" if reason is FinishReason.STOP else "incomplete"
        yield self._event(f"response.{kind}", response=self._head)

    def whole(self) -> dict[str, Any]:
        return self._head

    def _finish(self, reason: FinishReason, usage: Usage | None) -> None:
        """Completes the answer."""
        self._head = self._response("completed" if reason is FinishReason.STOP else "incomplete")
        if reason is not FinishReason.STOP:
            is_long = reason is FinishReason.LENGTH
            why = "max_output_tokens" if is_long else "aborted"
            self._head["incomplete_details"] = {"reason": why}
        if usage is not None:
            self._head["usage"] = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_thoughts},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._items,
        }

    def _open(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Opens an item, unless one of this kind is open; a call always is another one."""
        if self._is_open and self._items[-1]["type"] == kind and kind != "function_call":
            return
        yield from self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: dict[str, Any] = {
            "type": kind,
            "id": f"{prefix}_{self._head['id'].partition('_')[2]}_{len(self._items)}",
            "status": "in_progress",
            **fields,
        }
        if kind == "function_call":
            item["arguments"] = ""
        else:
            name, value = ("role", "assistant") if kind == "message" else ("summary", [])
            item |= {name: value, "content": []}
        self._items.append(item)
        self._is_open = True
        yield self._of_item("response.output_item.added", item=dict(item))
        if kind == "message":
            yield self._of_item(
                "response.content_part.added", item_id=item["id"], content_index=0, part=_part("")
            )

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._is_open:
            return
        item, text = self._items[-1], "".join(self._texts)
        self._texts.clear()
        self._is_open = False
        item["status"] = status
        place: dict[str, Any] = {"item_id": item["id"]}
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._of_item(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=text,
            )
        elif item["type"] == "message":
            item["content"] = [_part(text)]
            place = {**place, "content_index": 0}
            yield self._of_item("response.output_text.done", **place, text=text, logprobs=[])
            yield self._of_item("response.content_part.done", **place, part=_part(text))
        else:
            item["content"] = [{"type": "reasoning_text", "text": text}]
            yield self._of_item("response.reasoning_text.done", **place, content_index=0, text=text)
        yield self._of_item("response.output_item.done", item=item)

    def _piece(self, kind: str, text: str, **fields: Any) -> bytes:
        self._texts.append(text)
        return self._of_item(kind, item_id=self._items[-1]["id"], delta=text, **fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {to_json(content)}\n\n".encode()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
