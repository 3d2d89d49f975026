"""Responses of the generating routes: choices, usage and events, encoded while deltas come.

Logprobs can be megabytes. Encoding them all at the end, or sending them at once, would block every
other request of this event loop.
"""

from __future__ import annotations

import asyncio
import enum
import math
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import Deltas, GenerateStream
from inference_svc.api.http.sse import DONE, to_event, to_json
from inference_svc.core import (
    AdapterVersion,
    FinishReason,
    PackedLogprobs,
    Request,
    RoutedExperts,
    TokenLogprobs,
    joined_experts,
    split_logprobs,
)
from inference_svc.engine.messages import Usage
from inference_svc.frontend.output_stream import Delta
from servicekit.shares import Reservation, Shares

PART_BYTES = 64 << 10
"""Sent before other requests may run."""

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}

RESERVED_BYTES, ID_BYTES, VERSION_BYTES = 16 << 10, 8, 512
"""Reserved for an answer at once; and the bytes of a token's id."""

SLICE_TOKENS, SLICE_SCORES_BYTES, SLICE_ROUTED_BYTES = 32, 4 << 10, 256 << 10
"""Tokens with logprobs, bytes of packed ones, and bytes of experts, that are formatted before other
requests may run."""
FEW_LOGPROBS = 21
"""Logprobs of a token for which a slice has SLICE_TOKENS tokens; with more logprobs it has
fewer."""

NO_USAGE = Usage(0, 0, 0)


class PromptIds(enum.Enum):
    """Where an answer has its prompts' token ids; of a stream once, as early as it can."""

    NOWHERE = enum.auto()
    IN_CHOICES = enum.auto()
    IN_HEAD = enum.auto()


class ChoiceFormatter(Protocol):
    """Formats one choice. Its logprobs are lists by name with an entry for each token, and the
    `logprob_constants`."""

    logprob_constants: Mapping[str, None]
    scores_in_choice: bool
    """Whether log probabilities of a prompt are part of its first choice, not of the response."""

    def prompt_logprobs(self, scores: PackedLogprobs) -> list[dict[str, Any]]:
        """Returns an entry for each token of the prompt."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]: ...

    def full(self, choice: Choice) -> dict[str, Any]:
        """Returns the choice without its logprobs."""
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
    """One choice's deltas joined, logprobs already encoded. If it `has_scores`, the prompt's are
    among them, but its first token has none."""

    def __init__(self, formatter: ChoiceFormatter, *, has_scores: bool = False) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.usage = NO_USAGE
        self._formatter = formatter
        self._texts: list[str] = []
        self._logprobs: dict[str, list[bytes]] = {}
        self._routed: _RoutedText | None = None
        self._versions: list[dict[str, Any]] = []
        self._scores = [b"null"] if has_scores else []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, delta: Delta) -> int:
        """Returns about how many bytes that adds to the answer."""
        num_bytes = len(delta.text) + ID_BYTES * len(delta.token_ids)
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        num_bytes += self._add_version(delta)
        self.finish_reason = delta.finish_reason
        self.usage = delta.usage or self.usage
        if delta.logprobs:
            for name, entries in self._formatter.logprobs(delta.logprobs).items():
                encoded = to_json(entries)[1:-1].encode()
                self._logprobs.setdefault(name, []).append(encoded)
                num_bytes += len(encoded)
        for scores in delta.scores if self._scores else ():
            encoded = to_json(self._formatter.prompt_logprobs(scores))[1:-1].encode()
            self._scores.append(encoded)
            num_bytes += len(encoded)
        for part in delta.routed:
            if self._routed is None:
                self._routed = _RoutedText(part)
            num_bytes += self._routed.add(part)
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

    def scores_to_json(self) -> bytes:
        """Returns the field with the log probabilities of the prompt, if there are any."""
        return b',"prompt_logprobs":[%s]' % b",".join(self._scores) if self._scores else b""

    def to_json(self) -> bytes:
        lists = [
            b'"%s":[%s]' % (name.encode(), b",".join(entries))
            for name, entries in self._logprobs.items()
        ]
        lists += [b'"%s":null' % name.encode() for name in self._formatter.logprob_constants]
        logprobs = b"{%s}" % b",".join(lists) if self._logprobs else b"null"
        routed = b"" if self._routed is None else b',"routed_experts":' + self._routed.to_json()
        scores = self.scores_to_json() if self._formatter.scores_in_choice else b""
        choice = to_json(self._formatter.full(self)).encode()[:-1]
        return b'%s,"logprobs":%s%s%s%s}' % (
            *(choice, logprobs, routed, scores),
            self._versions_json(),
        )


def to_version(version: AdapterVersion) -> dict[str, Any]:
    return {
        "name": version.label,
        "digest": version.digest,
        "kept_tokens": version.num_kept,
    }


class _RoutedText:
    """The experts of neighbouring tokens as base64, encoded while they come: a remainder of less
    than three bytes waits for more."""

    def __init__(self, first: RoutedExperts) -> None:
        self._first = first
        self._num_tokens = 0
        self._encoded: list[bytes] = []
        self._rest = b""

    def add(self, part: RoutedExperts) -> int:
        """Returns how many bytes that adds."""
        data = self._rest + part.experts
        whole = len(data) - len(data) % 3
        encoded, self._rest = b64encode(data[:whole]), data[whole:]
        self._encoded.append(encoded)
        self._num_tokens += part.num_tokens
        return len(encoded)

    def to_json(self) -> bytes:
        head = to_json(_routed_head(self._first, self._num_tokens)).encode()[:-1]
        return b'%s,"data":"%s"}' % (head, b"".join((*self._encoded, b64encode(self._rest))))


def _routed_head(first: RoutedExperts, num_tokens: int) -> dict[str, Any]:
    """Returns the fields that describe how to read the experts of so many tokens."""
    return {
        "first_position": first.first_position,
        "shape": [num_tokens, first.num_layers, first.num_chosen],
        "dtype": f"uint{8 * first.bytes_per_id}",
    }


def _to_routed(part: RoutedExperts) -> dict[str, Any]:
    return {**_routed_head(part, part.num_tokens), "data": b64encode(part.experts).decode()}


async def encode_full(
    stream: GenerateStream,
    formatters: Sequence[ChoiceFormatter],
    head: Mapping[str, Any],
    memory: AnswerMemory,
    prompt_ids: PromptIds = PromptIds.NOWHERE,
    *,
    has_scores: bool = False,
) -> list[bytes]:
    """Returns one JSON object in parts: `head`, the usage, and a choice for each formatter. Raises
    ShareExceeded, and like GenerateStream.deltas. If it `has_scores`, the first choice of each
    prompt has the prompt's."""
    of_head, of_choices = _prompt_members(stream, prompt_ids)
    memory.add(len(of_head) + sum(map(len, of_choices)))
    per_prompt = stream.call.num_choices
    choices = [
        Choice(formatter, has_scores=has_scores and index % per_prompt == 0)
        for index, formatter in enumerate(formatters)
    ]
    async with stream.deltas() as deltas, aclosing(in_slices(deltas, stream.call)) as slices:
        async for index, delta in slices:
            memory.add(choices[index].add(delta))
    usage = to_usage([choice.usage for choice in choices], per_prompt)
    parts = [to_json({**head, "usage": usage})[:-1].encode() + of_head + b',"choices":[']
    for choice, prompt in zip(choices, of_choices, strict=True):
        parts += (choice.to_json()[:-1] + prompt, b"},")
        await asyncio.sleep(0)
    scores = b"" if formatters[0].scores_in_choice else choices[0].scores_to_json()
    parts[-1] = b"}]" + scores + b"}"
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
            if delta.routed:
                [routed] = delta.routed
                chunk["routed_experts"] = _to_routed(routed)
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
    echoed_top_k = call.sampling.logprobs if call.echo else None
    async for index, delta in deltas:
        for each in _slices(delta, echoed_top_k):
            num_top = each.logprobs[0].num_top if each.logprobs else 0
            share = len(each.logprobs) / _slice_tokens(num_top)
            share += sum(len(part.experts) for part in each.routed) / SLICE_ROUTED_BYTES
            packed = (part.num_tokens * part.token_bytes for part in each.scores)
            share += sum(packed) / SLICE_SCORES_BYTES
            filled += share
            if filled > 1:
                filled = share
                await asyncio.sleep(0)
            yield index, each


def _slice_tokens(num_top: int) -> int:
    """Returns how many tokens a slice has: fewer if each has many logprobs."""
    return max(1, min(SLICE_TOKENS, SLICE_TOKENS * FEW_LOGPROBS // (1 + num_top)))


def _echo_slices(delta: Delta, top_k: int) -> Iterator[Delta]:
    """Yields the log probabilities of an echoed prompt in the form of generated tokens', slice by
    slice: objects of all that is not read yet would block the event loop. The slices have them as
    arrays, too."""
    for piece in delta.scores:
        size = _slice_tokens(piece.top_k)
        for start in range(0, piece.num_tokens, size):
            part = piece.slice(start, start + size)
            echoed = [
                TokenLogprobs.of(token_id, logprob, ids[:top_k], values[:top_k])
                for token_id, logprob, ids, values in zip(
                    *(part.token_ids.tolist(), part.logprobs.tolist()),
                    *(part.top_ids, part.top_logprobs),
                    strict=True,
                )
            ]
            yield Delta(logprobs=echoed, scores=[part], version=delta.version)


def _slices(delta: Delta, echoed_top_k: int | None = None) -> Iterator[Delta]:
    """Splits a delta by its experts, its prompt's and its logprobs, which take long to format: data
    that a slow reader has not read grows without a bound. The text is in the last slice. A slice
    has experts of neighbouring tokens in one piece. With `echoed_top_k` the logprobs begin with the
    echoed prompt's, as many for each token; the first token's are not a number."""
    if echoed_top_k is not None:
        yield from _echo_slices(delta, echoed_top_k)
        first = [TokenLogprobs(token_id, math.nan) for token_id in delta.echoed_ids[:1]]
        delta = replace(delta, logprobs=first + delta.logprobs, scores=[])
    for scores in split_logprobs(delta.scores, SLICE_SCORES_BYTES):
        yield Delta(scores=[scores], version=delta.version)
    last_piece: RoutedExperts | None = None
    for piece in joined_experts(delta.routed, SLICE_ROUTED_BYTES):
        if last_piece is not None:
            yield Delta(routed=[last_piece], version=delta.version)
        last_piece = piece
    delta = replace(delta, scores=[], routed=[] if last_piece is None else [last_piece])
    num_tokens = len(delta.logprobs)
    size = _slice_tokens(delta.logprobs[0].num_top) if num_tokens else SLICE_TOKENS
    last = max(num_tokens - 1, 0) // size * size
    for start in range(0, last, size):
        end = start + size
        logprobs = delta.logprobs[start:end]
        yield Delta(delta.token_ids[start:end], logprobs=logprobs, version=delta.version)
    if last:
        token_ids, logprobs = delta.token_ids[last:], delta.logprobs[last:]
        delta = replace(delta, token_ids=token_ids, logprobs=logprobs)
    yield delta


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
