"""Loads an adapter before its first request, pins it, and shows the memory that holds it."""

from __future__ import annotations

import os
import sys

from loadout import Client

INFERENCE = os.environ.get("LOADOUT_INFERENCE", "127.0.0.1:7080")
TOKEN = os.environ.get("LOADOUT_TOKEN")


def main(adapter: str = "upper") -> None:
    with Client(inference=INFERENCE, token=TOKEN) as client:
        loaded = client.load(adapter, pin=True)
        print(f"{adapter} is pinned on the {loaded.tier.value}, {loaded.num_bytes} bytes")
        for resident in client.residents():
            pinned = "pinned" if resident.pinned else "may be evicted"
            print(f"{', '.join(resident.names)}: {resident.tier.value}, {pinned}")
        client.unpin_resident(adapter)
        print(f"{client.unload(adapter)} bytes freed")


if __name__ == "__main__":
    main(*sys.argv[1:])
