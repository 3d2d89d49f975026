"""Lists the catalog, then follows every change to it until you press Ctrl-C.

After a lost connection the client resumes by itself after the last event.
"""

from __future__ import annotations

import contextlib
import os

from loadout import Client
from loadout.errors import OutOfRange
from loadout.types import EventKind

STORE = os.environ.get("LOADOUT_STORE", "127.0.0.1:7070")
TOKEN = os.environ.get("LOADOUT_TOKEN")


def read_all(client: Client) -> tuple[dict[str, int], int]:
    """Returns the version of every name, and the revision from which to watch without a gap."""
    page = client.list_page()
    revision = page.revision
    found = {each.name: each.version for each in page.adapters}
    while page.next_page_token:
        page = client.list_page(page_token=page.next_page_token)
        found |= {each.name: each.version for each in page.adapters}
    return found, revision


def main() -> None:
    with Client(store=STORE, token=TOKEN) as client:
        while True:
            names, revision = read_all(client)
            print(f"{len(names)} adapters at revision {revision}", flush=True)
            try:
                for event in client.watch(revision):
                    if event.kind is not EventKind.BOOKMARK:
                        version = f"@{event.version}" if event.version else ""
                        print(f"{event.kind.value} {event.name}{version}", flush=True)
            except OutOfRange:
                continue  # the history no longer reaches back to this revision, so list again


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
