"""`loadout versions`, `loadout rollback`, `loadout prune` and `loadout delete`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.filesize import decimal

from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.local.completion import AdapterName
from loadout.cli.output import new_table, number_ranges, print_json, table_console
from loadout.types import Adapter

VERSIONS_EXAMPLES = """\b
Examples:
  loadout versions french
  loadout versions acme/support --json | jq -r '.versions[].digest'
"""

PRUNE_EXAMPLES = """\b
Examples:
  loadout prune french --keep 5
"""

ROLLBACK_EXAMPLES = """\b
Examples:
  loadout versions french
  loadout rollback french 3
  loadout rollback french 3 --if-current-digest sha256:...
"""

DELETE_EXAMPLES = """\b
Examples:
  loadout delete french
  loadout delete acme/support --version 2
"""


@connects
def versions(
    name: AdapterName,
    as_json: options.Json = False,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """List an adapter's versions, newest first.

    Deleted versions are listed as long as `loadout rollback` can restore them.
    """
    with connection.client(store=store) as client:
        pages = [client.version_page(name)]
        while token := pages[-1].next_page_token:
            pages.append(client.version_page(name, page_token=token))
    found = [adapter for page in pages for adapter in page.adapters]
    current = pages[-1].current_version
    if as_json:
        print_json({"current_version": current, "versions": found})
        return
    columns = ("adapter", "recorded", "by", "source", "size", "digest", "state")
    table = new_table(*columns, right=("size",))
    for adapter in found:
        table.add_row(*_cells(adapter, current))
    table_console().print(table)


@connects
def rollback(
    name: AdapterName,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", min=1, help="Version to make current.")
    ],
    if_current_digest: Annotated[
        str, typer.Option(metavar="DIGEST", help="Fail unless the name points to this digest now.")
    ] = "",
    as_json: options.Json = False,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Make an older version current again.

    You can restore a deleted version until its grace period ends.
    """
    with connection.client(store=store) as client:
        result = client.rollback(name, version, if_current_digest=if_current_digest)
    if as_json:
        print_json(result)
        return
    typer.echo(f"{result.adapter.ref} {result.adapter.digest} at revision {result.revision}")


@connects
def prune(
    name: AdapterName,
    keep: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of newest versions to keep.")
    ],
    as_json: options.Json = False,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Delete an adapter's old versions.

    Keeps the newest versions, the current one and pinned ones. Running requests finish. `loadout
    rollback` restores a version until its grace period ends.
    """
    with connection.client(store=store) as client:
        deleted = client.prune(name, keep)
    if as_json:
        print_json({"deleted_versions": deleted})
    elif deleted:
        typer.echo(f"{name}: versions deleted: {number_ranges(deleted)}")
    else:
        typer.echo(f"{name}: no version to delete")


@connects
def delete(
    name: AdapterName,
    version: Annotated[
        int,
        typer.Option(metavar="VERSION", min=0, help="Version to delete. 0: all versions."),
    ] = 0,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Delete an adapter, or one version of it.

    Running requests finish. `loadout rollback` restores it until its grace period ends.
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
        "pinned" if adapter.pinned else "",
        "deleted" if adapter.delete_time else "",
        f"signed by {adapter.signed_by}" if adapter.signed_by else "",
    )
    return ", ".join(filter(None, facts))
