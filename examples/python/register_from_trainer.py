"""Registers a checkpoint as a trainer's last step, and uses it at once.

python register_from_trainer.py NAME URI|DIR
"""

from __future__ import annotations

import os
import sys

from loadout import Client
from loadout.errors import Conflict, NotFound

INFERENCE = os.environ.get("LOADOUT_INFERENCE", "127.0.0.1:7080")
STORE = os.environ.get("LOADOUT_STORE", "127.0.0.1:7070")
TOKEN = os.environ.get("LOADOUT_TOKEN")


def current_digest(client: Client, name: str) -> str:
    try:
        return client.get(name).digest
    except NotFound:
        return ""


def main(name: str, source: str) -> None:
    with Client(inference=INFERENCE, store=STORE, token=TOKEN) as client:
        try:
            # The call fails if another trainer has registered this name in between.
            registration = client.register(
                name,
                source,
                if_current_digest=current_digest(client, name),
                labels={"trainer": "example"},
            )
        except Conflict as error:
            raise SystemExit(f"{name} has changed meanwhile: {error}") from error
        adapter = registration.adapter
        print(f"{adapter.ref} rank {adapter.rank} at revision {registration.revision}")

        # With `min_revision` every replica answers with this version or a newer one.
        answer = client.complete(
            "loadout=", adapter=name, min_revision=registration.revision, temperature=0
        )
        assert answer.adapter is not None
        print(f"{answer.adapter.name} answers {answer.text}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: python register_from_trainer.py NAME URI|DIR", file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
