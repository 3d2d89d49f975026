"""The requests behind one answer: run together, told apart by their index."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from inference_svc.api.request_record import Account
from inference_svc.api.service import Service
from inference_svc.core import FinishReason, Request
from inference_svc.engine.messages import Usage
from inference_svc.frontend.output_stream import Delta

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}

SLICE_TOKENS = 32
"""With logprobs, told without a look at other requests."""


def to_usage(usages: Sequence[Usage], per_prompt: int) -> dict[str, Any]:
    """Of all choices in order, `per_prompt` of each prompt: a prompt counts once."""
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


async def run_all(
    service: Service, requests: Sequence[Request], account: Account
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all, each with its request's index. What one raises ends them all; to be
    closed as Service.run. Each has an account of its own, which begins as `account` is. Their ids
    need not be unique."""
    merge = _merged if len(requests) > 1 else _alone
    async with aclosing(merge(service, requests, account)) as deltas:
        async for index, delta in deltas:
            *others, last = _slices(delta)
            for each in others:
                yield index, each
                await asyncio.sleep(0)
            yield index, last


def _slices(delta: Delta) -> Iterator[Delta]:
    """Parts that can be told at once. What a slow reader has not read grows without a bound, and
    its logprobs take long to write; the text is in the last one."""
    num_tokens = len(delta.logprobs)
    last = max(num_tokens - 1, 0) // SLICE_TOKENS * SLICE_TOKENS
    for start in range(0, last, SLICE_TOKENS):
        part = slice(start, start + SLICE_TOKENS)
        yield Delta(delta.token_ids[part], logprobs=delta.logprobs[part])
    if last:
        delta = replace(delta, token_ids=delta.token_ids[last:], logprobs=delta.logprobs[last:])
    yield delta


async def _alone(
    service: Service, requests: Sequence[Request], account: Account
) -> AsyncGenerator[tuple[int, Delta], None]:
    async with aclosing(_run(service, requests[0], account, Ending())) as deltas:
        async for delta in deltas:
            yield 0, delta


async def _merged(
    service: Service, requests: Sequence[Request], account: Account
) -> AsyncGenerator[tuple[int, Delta], None]:
    # No longer than this, so that a slow reader's deltas grow instead of their number.
    arrived: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(len(requests))
    ending = Ending()

    async def feed(index: int) -> None:
        try:
            async with aclosing(_run(service, requests[index], account, ending)) as deltas:
                async for delta in deltas:
                    await arrived.put((index, delta))
        except Exception as error:
            if ending.error is None:  # else nobody listens any more
                await arrived.put((index, error))

    feeds = [asyncio.create_task(feed(index)) for index in range(len(requests))]
    try:
        num_running = len(requests)
        while num_running:
            index, news = await arrived.get()
            if isinstance(news, Exception):
                ending.error = news
                raise news
            num_running -= news.finish_reason is not None
            yield index, news
        await asyncio.gather(*feeds)  # which have nothing left but to end
    finally:
        for each in feeds:
            each.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)


class Ending:
    """Why the requests of one answer end before their time; None: nobody wants it any more."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def told(self) -> Iterator[None]:
        """Whoever is cancelled in it, since another one has failed, fails as that one did: the
        caller has not left."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            if self.error is not None:
                raise self.error from None
            raise


async def _run(
    service: Service, request: Request, account: Account, ending: Ending
) -> AsyncGenerator[Delta, None]:
    # What a mesh sends along as the id of a request is not one's own, as the engine's has to be.
    unique = replace(request, request_id=f"{request.request_id}-{secrets.token_hex(8)}")
    with service.accounts.further(account, request.request_id) as own, ending.told():
        async with aclosing(service.run(unique, own)) as deltas:
            async for delta in deltas:
                yield delta
