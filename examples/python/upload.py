"""Uploads a local folder, as PEFT saves one, with a progress line.

python upload.py NAME DIR
"""

from __future__ import annotations

import os
import sys

from loadout import Client

STORE = os.environ.get("LOADOUT_STORE", "127.0.0.1:7070")
TOKEN = os.environ.get("LOADOUT_TOKEN")


def show(sent: int, total: int) -> None:
    print(f"\r{sent / total:.0%}", end="", file=sys.stderr)


def main(name: str, folder: str) -> None:
    with Client(store=STORE, token=TOKEN) as client:
        registration = client.register(
            name, folder, progress=show, labels={"team": "demo"}, description="an example"
        )
        print(file=sys.stderr)
        print(registration.adapter.ref, registration.adapter.digest)
        for adapter in client.list("label.team=demo"):
            print(f"{adapter.ref} has {adapter.source_bytes} bytes, rank {adapter.rank}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: python upload.py NAME DIR", file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
