"""Generates once with an adapter and once with the base model."""

from __future__ import annotations

import os

from loadout import Client

INFERENCE = os.environ.get("LOADOUT_INFERENCE", "127.0.0.1:7080")
TOKEN = os.environ.get("LOADOUT_TOKEN")


def main() -> None:
    with Client(inference=INFERENCE, token=TOKEN) as client:
        answer = client.complete("loadout=", adapter="reverse", temperature=0, max_tokens=32)
        print("reverse:", answer.text)
        if answer.usage is not None and answer.adapter is not None:
            print(f"{answer.usage.completion_tokens} tokens by {answer.adapter.name}")

        for chunk in client.generate("loadout=", temperature=0, max_tokens=32):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
