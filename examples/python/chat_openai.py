"""Chats through the OpenAI client, for which each adapter is a model."""

from __future__ import annotations

import os

from openai import OpenAI

HTTP = os.environ.get("LOADOUT_HTTP", "127.0.0.1:8000")
TOKEN = os.environ.get("LOADOUT_TOKEN", "none")


def main() -> None:
    with OpenAI(base_url=f"http://{HTTP}/v1", api_key=TOKEN) as client:
        print(sorted(model.id for model in client.models.list()))
        stream = client.chat.completions.create(
            model="reverse",
            messages=[{"role": "user", "content": "loadout"}],
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
