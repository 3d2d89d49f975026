"""Streams many generations at once, token by token, on one event loop."""

from __future__ import annotations

import asyncio
import os

from loadout import AsyncClient

INFERENCE = os.environ.get("LOADOUT_INFERENCE", "127.0.0.1:7080")
TOKEN = os.environ.get("LOADOUT_TOKEN")
ADAPTERS = ("upper", "reverse", "sort", "rot13")


async def stream(client: AsyncClient, adapter: str) -> None:
    text = ""
    # When you leave the block, also with an exception, the server cancels the request.
    async with client.generate("loadout=", adapter=adapter, temperature=0) as chunks:
        async for chunk in chunks:
            text += chunk.text
            print(f"{adapter:8} {text}")


async def main() -> None:
    async with (
        AsyncClient(inference=INFERENCE, token=TOKEN) as client,
        asyncio.TaskGroup() as group,
    ):
        for adapter in ADAPTERS:
            group.create_task(stream(client, adapter))


if __name__ == "__main__":
    asyncio.run(main())
