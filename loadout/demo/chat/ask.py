"""One question to the base model and to all adapters at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadout.aio import AsyncClient
from loadout.types import ChatMessage

MAX_ANSWER_TOKENS = 80


@dataclass(slots=True)
class Answer:
    """An answer so far. `adapter` is "" for the base model; `first_token_s` counts from sending, at
    the client, and is None until then."""

    adapter: str
    text: str = ""
    first_token_s: float | None = None
    is_complete: bool = False


async def ask_all(
    address: str, question: str, answers: Sequence[Answer], changed: Callable[[], None]
) -> None:
    """Asks all at once, greedily, and fills in the answers as their tokens arrive. Raises the first
    LoadoutError."""

    async def ask(client: AsyncClient, answer: Answer) -> None:
        sent_s = time.monotonic()
        stream = client.generate(
            [ChatMessage(role="user", content=question)],
            adapter=answer.adapter,
            temperature=0,
            max_tokens=MAX_ANSWER_TOKENS,
        )
        async for chunk in stream:
            if chunk.token_ids and answer.first_token_s is None:
                answer.first_token_s = time.monotonic() - sent_s
            answer.text += chunk.text
            changed()
        answer.is_complete = True
        changed()

    try:
        async with AsyncClient(inference=address) as client, asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(ask(client, answer))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
