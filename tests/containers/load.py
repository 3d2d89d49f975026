"""Callers of a cluster, run in a pod: `python load.py ADAPTER...` generates until its
standard input ends. It prints a line once each adapter was served, and at the end how many requests
were answered with which text, and every failure."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading

from loadout import AsyncClient, TlsConfig
from loadout.errors import LoadoutError

CALLERS = 4
RETRY_S = 0.2
MAX_FAILURES = 100
"""Before all are served."""


async def call(
    client: AsyncClient, adapter: str, ended: threading.Event, first: asyncio.Event, result: dict
) -> None:
    while not ended.is_set():
        try:
            stream = client.generate("hello=", adapter=adapter, max_tokens=24, temperature=0)
            text = "".join([chunk.text async for chunk in stream])
        except LoadoutError as error:
            result["failures"].append(f"{adapter}: {type(error).__name__}: {error}")
            if not first.is_set() and len(result["failures"]) > MAX_FAILURES:
                raise
            await asyncio.sleep(RETRY_S)
        else:
            result["texts"].setdefault(adapter, {}).setdefault(text, 0)
            result["texts"][adapter][text] += 1
            first.set()


async def main(adapters: list[str]) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    result: dict = {"texts": {}, "failures": []}
    token = os.environ.get("LOADOUT_TOKEN")
    authority = os.environ.get("LOADOUT_TLS_CA_FILE")
    tls = TlsConfig(ca_file=authority) if authority else None
    firsts = [asyncio.Event() for _ in range(CALLERS)]
    async with (
        AsyncClient(os.environ["LOADOUT_INFERENCE"], token=token, tls=tls) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CALLERS):
            adapter = adapters[number % len(adapters)]
            group.create_task(call(client, adapter, ended, firsts[number], result))
        for first in firsts:
            await first.wait()
        print("served", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
