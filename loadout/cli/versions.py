"""`loadout adapters --versions`, `loadout rollback` and `loadout delete`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.filesize import decimal

from loadout.cli import options
from loadout.cli.completion import AdapterName
from loadout.cli.connection import Connection, connects
from loadout.cli.output import new_table, print_json, table_console
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


def list_versions(name: str, client: Client, *, as_json: bool) -> None:
    """Prints a name's versions, newest first; closes the client."""
    with client:
        pages = [client.version_page(name)]
        while token := pages[-1].next_page_token:
            pages.append(client.version_page(name, page_token=token))
    versions = [adapter for page in pages for adapter in page.adapters]
    current = pages[-1].current_version
    if as_json:
        print_json({"current_version": current, "versions": versions})
        return
    columns = ("adapter", "recorded", "by", "source", "size", "digest", "state")
    table = new_table(*columns, right=("size",))
    for adapter in versions:
        table.add_row(*_cells(adapter, current))
    table_console().print(table)


@connects
def rollback(
    name: AdapterName,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", min=1, help="Version to make current.")
    ],
    if_current_digest: Annotated[
        str, typer.Option(metavar="DIGEST", help="Digest that the name must point to now.")
    ] = "",
    as_json: options.Json = False,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Make an older version current again.

    A deleted version can be restored until its grace period ends.
    """
    with connection.client(store=store) as client:
        result = client.rollback(name, version, if_current_digest=if_current_digest)
    if as_json:
        print_json(result)
        return
    typer.echo(f"{result.adapter.ref} {result.adapter.digest} at revision {result.revision}")


@connects
def delete(
    name: AdapterName,
    version: Annotated[
        int, typer.Option(metavar="VERSION", min=0, help="Version to delete. Default: all.")
    ] = 0,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Delete an adapter, or one version of it.

    Running requests finish; `loadout rollback` restores it until its grace period ends.
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
