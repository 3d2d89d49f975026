"""`loadout adapters --versions`, `loadout rollback` and `loadout delete`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.output import table_console
from loadout.client import Client
from loadout.types import Adapter

ROLLBACK_EXAMPLES = """\b
Examples:
  loadout adapters --versions french
  loadout rollback french 3
  loadout rollback french 3 --if-current-digest sha256:...
"""

DELETE_EXAMPLES = """\b
Examples:
  loadout delete french
  loadout delete acme/support --version 2
"""

Name = Annotated[str, typer.Argument(metavar="NAME", help="[tenant/]name of the adapter.")]


def list_versions(name: str, client: Client) -> None:
    """Prints a name's versions, newest first; closes the client."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("adapter", "recorded", "by", "source", "size", "digest", "state"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    with client:
        page = client.version_page(name)
        while True:
            for adapter in page.adapters:
                table.add_row(*_cells(adapter, page.current_version))
            if not page.next_page_token:
                break
            page = client.version_page(name, page_token=page.next_page_token)
    table_console().print(table)


@connects
def rollback(
    name: Name,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", min=1, help="The one to go back to.")
    ],
    if_current_digest: Annotated[
        str, typer.Option(metavar="DIGEST", help="Refuse unless the name points to this one now.")
    ] = "",
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Make an older version current again.

    Also one that was deleted, as long as its grace lasts.
    """
    with connection.client(store=store) as client:
        result = client.rollback(name, version, if_current_digest=if_current_digest)
    typer.echo(f"{result.adapter.ref} {result.adapter.digest} at revision {result.revision}")


@connects
def delete(
    name: Name,
    version: Annotated[
        int, typer.Option(metavar="VERSION", min=0, help="Only this one; the default is all.")
    ] = 0,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Delete an adapter, or one version of it.

    Running requests finish; `loadout rollback` brings it back as long as its grace lasts.
    """
    with connection.client(store=store) as client:
        revision = client.delete(name, version)
    typer.echo(f"{f'{name}@{version}' if version else name} deleted at revision {revision}")


def _cells(adapter: Adapter, current_version: int) -> tuple[str, ...]:
    return (
        adapter.ref,
        f"{adapter.create_time:%Y-%m-%d %H:%M}" if adapter.create_time else "",
        adapter.created_by,
        " ".join(filter(None, (adapter.source_uri, adapter.source_revision))),
        decimal(adapter.source_bytes),
        adapter.digest,
        _state(adapter, current_version),
    )


def _state(adapter: Adapter, current_version: int) -> str:
    facts = (
        "current" if adapter.version == current_version else "",
        "deleted" if adapter.delete_time else "",
        f"signed by {adapter.signed_by}" if adapter.signed_by else "",
    )
    return ", ".join(filter(None, facts))
