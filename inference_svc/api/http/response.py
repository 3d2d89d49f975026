"""Responses of the generating routes: choices, usage and events, encoded while deltas come.

Logprobs can be megabytes. Encoding them all at the end, or sending them at once, would block every
other request of this event loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import Deltas, GenerateStream
from inference_svc.api.http.chat.tools import Calls
from inference_svc.api.http.results import FORMS, LogprobsFormatter, share, slices
from inference_svc.api.http.sse import DONE, to_event, to_json
from inference_svc.core import AdapterVersion, FinishReason, Request
from inference_svc.engine.transport.messages import Usage
from inference_svc.frontend.output_stream import Delta
from inference_svc.results.base import NOTHING, Wanted, grouped
from inference_svc.results.logprobs import LogprobsOption
from servicekit.shares import Reservation, Shares

PART_BYTES = 64 << 10
"""Sent before other requests may run."""

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}

RESERVED_BYTES, ID_BYTES, VERSION_BYTES, CALL_BYTES = 16 << 10, 8, 512, 256
"""Reserved for an answer at once; and the bytes of a token's id, and of a piece of a call."""

NO_USAGE = Usage(0, 0, 0)


class PromptIds(enum.Enum):
    """Where an answer has its prompts' token ids; of a stream once, as early as it can."""

    NOWHERE = enum.auto()
    IN_CHOICES = enum.auto()
    IN_HEAD = enum.auto()


class ChoiceFormatter(LogprobsFormatter, Protocol):
    """Formats one choice."""

    def full(self, choice: Choice) -> dict[str, Any]:
        """Returns the choice without its results."""
        ...

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """Returns None for a delta that has nothing to show yet."""
        ...


class AnswerMemory:
    """An answer's part of its account's share of `answers`, in bytes, until its client has read
    it."""

    def __init__(self, answers: Shares, account: str) -> None:
        self._answers = answers
        self._account = account
        self._place: Reservation | None = None
        self._num_bytes = self._num_reserved = 0

    def add(self, num_bytes: int) -> None:
        """Raises ShareExceeded."""
        self._num_bytes += num_bytes
        missing = self._num_bytes - self._num_reserved
        if missing <= 0:
            return
        missing = max(missing, RESERVED_BYTES)
        if self._place is None:
            self._place = self._answers.reserve(self._account, missing)
        else:
            self._place.grow(missing)
        self._num_reserved += missing

    def release(self) -> None:
        if self._place is not None:
            self._place.release()


class Choice:
    """One choice's deltas joined, results already encoded. `wanted` are the ones that its request
    asks for."""

    def __init__(self, formatter: ChoiceFormatter, wanted: Wanted = NOTHING) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.usage = NO_USAGE
        self._formatter = formatter
        self.calls = Calls()
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._forms = {kind: form(formatter, wanted) for kind, form in FORMS.items()}
        self._versions: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def thoughts(self) -> str:
        return "".join(self._thoughts)

    def add(self, delta: Delta) -> int:
        """Returns about how many bytes that adds to the answer."""
        num_bytes = len(delta.text) + len(delta.thoughts) + ID_BYTES * len(delta.token_ids)
        num_bytes += sum(CALL_BYTES + len(piece.arguments) for piece in delta.calls)
        self._texts.append(delta.text)
        self._thoughts.append(delta.thoughts)
        self.calls.add(delta.calls)
        self.token_ids += delta.token_ids
        num_bytes += self._add_version(delta)
        self.finish_reason = delta.finish_reason
        self.usage = delta.usage or self.usage
        for kind, parts in grouped(delta.parts).items():
            num_bytes += self._forms[kind].add(parts)
        return num_bytes

    def _add_version(self, delta: Delta) -> int:
        """Counts the delta's tokens as its version's; returns how many bytes that adds."""
        if not delta.token_ids:
            return 0
        version = None if delta.version is None else to_version(delta.version)
        if self._versions and self._versions[-1]["version"] == version:
            self._versions[-1]["num_tokens"] += len(delta.token_ids)
            return 0
        self._versions.append({"version": version, "num_tokens": len(delta.token_ids)})
        return 0 if version is None else VERSION_BYTES

    def _versions_json(self) -> bytes:
        """Returns which versions have made how many tokens, if it began to follow: the first are of
        the version that the answer names."""
        if all(each["version"] is None for each in self._versions):
            return b""
        return b',"adapter_versions":' + to_json(self._versions).encode()

    def answer_members(self) -> bytes:
        """Returns the results that are members of the answer, not of the choice."""
        return b"".join(form.member() for form in self._forms.values() if not form.is_in_choice)

    def to_json(self) -> bytes:
        choice = to_json(self._formatter.full(self)).encode()[:-1]
        members = [form.member() for form in self._forms.values() if form.is_in_choice]
        return b"".join((choice, *members, self._versions_json(), b"}"))


def to_version(version: AdapterVersion) -> dict[str, Any]:
    return {
        "name": version.label,
        "digest": version.digest,
        "kept_tokens": version.num_kept,
    }


async def encode_full(
    stream: GenerateStream,
    formatters: Sequence[ChoiceFormatter],
    head: Mapping[str, Any],
    memory: AnswerMemory,
    prompt_ids: PromptIds = PromptIds.NOWHERE,
) -> list[bytes]:
    """Returns one JSON object in parts: `head`, the usage, and a choice for each formatter. Raises
    ShareExceeded, and like GenerateStream.deltas."""
    of_head, of_choices = _prompt_members(stream, prompt_ids)
    memory.add(len(of_head) + sum(map(len, of_choices)))
    per_prompt = stream.call.num_choices
    choices = [
        Choice(formatter, request.wanted)
        for formatter, request in zip(formatters, stream.requests, strict=True)
    ]
    async with stream.deltas() as deltas, aclosing(in_slices(deltas, stream.call)) as slices:
        async for index, delta in slices:
            memory.add(choices[index].add(delta))
    usage = to_usage([choice.usage for choice in choices], per_prompt)
    parts = [to_json({**head, "usage": usage})[:-1].encode() + of_head + b',"choices":[']
    for choice, prompt in zip(choices, of_choices, strict=True):
        parts += (choice.to_json()[:-1] + prompt, b"},")
        await asyncio.sleep(0)
    parts[-1] = b"}]" + choices[0].answer_members() + b"}"
    return parts


def _prompt_members(stream: GenerateStream, prompt_ids: PromptIds) -> tuple[bytes, list[bytes]]:
    """Returns the prompts' fields for the answer's head and for each choice."""
    requests, per_prompt = stream.requests, stream.call.num_choices
    if prompt_ids is PromptIds.IN_CHOICES:
        members = [_prompt_member(request) for request in requests[::per_prompt]]
        return b"", [members[index // per_prompt] for index in range(len(requests))]
    of_head = _prompt_member(requests[0]) if prompt_ids is PromptIds.IN_HEAD else b""
    return of_head, [b""] * len(requests)


def _prompt_member(request: Request) -> bytes:
    """Returns the token ids of a request's prompt as one more member of a JSON object."""
    return b',"prompt_token_ids":' + to_json(request.prompt_token_ids).encode()


async def encode_events(
    stream: GenerateStream,
    formatters: Sequence[ChoiceFormatter],
    head: Mapping[str, Any],
    includes_usage: bool,
    prompt_ids: PromptIds = PromptIds.NOWHERE,
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events, each with `head` and a chunk of one choice; with `includes_usage`,
    a last one with the usage."""
    of_head, of_choices = _prompt_members(stream, prompt_ids)
    # Everything around the choice is the same in every event but the first: encoded once.
    before = to_json(head)[:-1]
    start = before + of_head.decode()
    after = '],"usage":null}\n\n' if includes_usage else "]}\n\n"
    usages = [NO_USAGE] * len(formatters)
    async with stream.deltas() as deltas, aclosing(in_slices(deltas, stream.call)) as slices:
        async for index, delta in slices:
            usages[index] = delta.usage or usages[index]
            chunk = formatters[index].chunk(delta)
            if chunk is None:
                continue
            for kind, group in grouped(delta.parts).items():
                chunk |= FORMS[kind].event(group)
            if delta.version is not None:
                chunk["adapter_version"] = to_version(delta.version)
            choice = to_json(chunk)[:-1] + of_choices[index].decode()
            yield f'data: {start},"choices":[{choice}}}{after}'.encode()
            start, of_choices[index] = before, b""
    if includes_usage:
        usage = to_usage(usages, stream.call.num_choices)
        yield to_event({**head, "choices": [], "usage": usage})
    yield DONE


def to_usage(usages: Sequence[Usage], per_prompt: int) -> dict[str, Any]:
    """Sums the usage of all choices in order, `per_prompt` of each prompt, which counts once."""
    firsts = usages[::per_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    cached_tokens = sum(usage.cached_prompt_tokens for usage in firsts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


async def in_slices(deltas: Deltas, call: GenerateCall) -> Deltas:
    """Yields deltas in slices, and lets the event loop run others between SLICE_TOKENS tokens with
    logprobs, or as many bytes of arrays as a slice has."""
    filled = 0.0
    logprobs = call.wanted.get(LogprobsOption) if call.echo else None
    echoed_top_k = None if logprobs is None else logprobs.top_k
    async for index, delta in deltas:
        for each in slices(delta, echoed_top_k):
            of_slice = share(each)
            filled += of_slice
            if filled > 1:
                filled = of_slice
                await asyncio.sleep(0)
            yield index, each


class FullResponse(Response):
    """A JSON response made of parts, whose `memory` is released once they are sent."""

    media_type = "application/json"

    def __init__(
        self, parts: Sequence[bytes], headers: Mapping[str, str], memory: AnswerMemory
    ) -> None:
        self._parts = parts
        self._memory = memory
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "content-length": str(sum(map(len, parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(send)
        finally:
            self._memory.release()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        num_bytes = 0
        for part in self._parts:
            for begin in range(0, len(part), PART_BYTES):
                body = part[begin : begin + PART_BYTES]
                await send({"type": "http.response.body", "body": body, "more_body": True})
                num_bytes += len(body)
                if num_bytes >= PART_BYTES:
                    num_bytes = 0
                    await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
