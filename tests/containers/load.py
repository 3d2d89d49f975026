"""Callers of a cluster, run in a pod: `python load.py INFERENCE ADAPTER...` generates until its
standard input ends, then prints how many requests were answered, and every failure."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

from loadout import AsyncClient
from loadout.errors import LoadoutError

CALLERS = 4


async def call(client: AsyncClient, adapter: str, ended: threading.Event, result: dict) -> None:
    while not ended.is_set():
        try:
            stream = client.generate("hello=", adapter=adapter, max_tokens=24, temperature=0)
            text = "".join([chunk.text async for chunk in stream])
        except LoadoutError as error:
            result["failures"].append(f"{adapter}: {type(error).__name__}: {error}")
        else:
            result["texts"].setdefault(adapter, {}).setdefault(text, 0)
            result["texts"][adapter][text] += 1


async def main(inference: str, adapters: list[str]) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    result: dict = {"texts": {}, "failures": []}
    async with AsyncClient(inference=inference) as client, asyncio.TaskGroup() as group:
        for number in range(CALLERS):
            adapter = adapters[number % len(adapters)]
            group.create_task(call(client, adapter, ended, result))
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
