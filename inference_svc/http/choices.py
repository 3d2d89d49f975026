"""The requests behind one answer: run together, told apart by their index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from inference_svc.accounts import Account
from inference_svc.core import FinishReason, Request, TokenLogprobs, Usage
from inference_svc.generation import Delta
from inference_svc.service import Service

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


NO_USAGE = Usage(0, 0, 0)


@dataclass(slots=True)
class Choice:
    """A request's deltas, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = NO_USAGE

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.usage = delta.usage or self.usage


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
    closed as Service.run. Each has an account of its own, which begins as `account` is."""
    if len(requests) == 1:
        async with aclosing(_run(service, requests[0], account)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    # No longer than this, so that a slow reader's deltas grow instead of their number.
    arrived: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(len(requests))

    async def feed(index: int) -> None:
        try:
            async with aclosing(_run(service, requests[index], account)) as deltas:
                async for delta in deltas:
                    await arrived.put((index, delta))
        except Exception as error:
            await arrived.put((index, error))

    feeds = [asyncio.create_task(feed(index)) for index in range(len(requests))]
    try:
        num_running = len(requests)
        while num_running:
            index, news = await arrived.get()
            if isinstance(news, Exception):
                raise news
            num_running -= news.finish_reason is not None
            yield index, news
        await asyncio.gather(*feeds)  # which have nothing left but to end
    finally:
        for each in feeds:
            each.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)


async def _run(service: Service, request: Request, account: Account) -> AsyncGenerator[Delta, None]:
    with service.accounts.further(account, request.request_id) as own:
        async with aclosing(service.run(request, own)) as deltas:
            async for delta in deltas:
                yield delta
