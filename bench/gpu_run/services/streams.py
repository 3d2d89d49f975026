"""Generates from many streams at once over gRPC, and notes when their tokens arrive."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from bench.gpu_run.services.figures import Message, Round, Stream, Streams
from loadout import AsyncClient

FIRST_TOKEN = 3
"""The first id that is no mark of a beginning or an end."""


async def run_round(
    client: AsyncClient, wanted: Round, names: Sequence[str], min_revision: int, vocab_size: int
) -> Streams:
    """Runs all streams of a round, with the adapters `names` in turn, and none if it is empty."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(FIRST_TOKEN, vocab_size) for _ in range(wanted.prompt_tokens)]
        for _ in range(wanted.streams)
    ]
    chosen = [names[row % len(names)] if names else "" for row in range(wanted.streams)]
    began_s = time.perf_counter()
    found = await asyncio.gather(
        *(
            _generate(client, prompt, name, wanted.new_tokens, min_revision)
            for prompt, name in zip(prompts, chosen, strict=True)
        )
    )
    return Streams(time.perf_counter() - began_s, tuple(found))


async def _generate(
    client: AsyncClient, prompt: Sequence[int], name: str, max_tokens: int, min_revision: int
) -> Stream:
    """Returns the messages of a stream. Raises AssertionError for a wrong number of tokens."""
    began_s = time.perf_counter()
    messages: list[Message] = []
    chunks = client.generate(
        prompt,
        adapter=name,
        min_revision=min_revision,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
    )
    async for chunk in chunks:
        if chunk.token_ids:
            messages.append(Message(time.perf_counter() - began_s, len(chunk.token_ids)))
    num_tokens = sum(message.num_tokens for message in messages)
    assert num_tokens == max_tokens, f"{num_tokens} tokens instead of {max_tokens}"
    return tuple(messages)
