"""Completion of adapter names in a shell, by the services' lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Annotated

import typer

from loadout.cli import options
from loadout.cli.config import environment_store
from loadout.cli.connection import Connection
from loadout.cli.output import CommandFailed
from loadout.client import Client
from loadout.errors import LoadoutError

MAX_NAMES = 100


def adapter_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the store's adapters whose names begin with `incomplete`."""

    def read(client: Client, tenant: str) -> Iterable[str]:
        given, slash, prefix = incomplete.rpartition("/")
        filtered = f"tenant={given or tenant} name={prefix}".removesuffix(" name=")
        for adapter in client.list(filtered, page_size=MAX_NAMES):
            yield adapter.name if slash else adapter.name.partition("/")[2]

    default = environment_store() or options.DEFAULT_STORE
    return _names(context, "store", default, read)


def resident_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the resident adapters whose names begin with `incomplete`."""

    def read(client: Client, tenant: str) -> Iterable[str]:
        for resident in client.residents():
            for ref in resident.names:
                name = ref.removeprefix("" if "/" in incomplete else f"{tenant}/")
                if name.startswith(incomplete):
                    yield name

    return _names(context, "inference", options.DEFAULT_INFERENCE, read)


def _names(
    context: typer.Context,
    service: str,
    default: str,
    read: Callable[[Client, str], Iterable[str]],
) -> list[str]:
    """Returns no names, rather than an error, if the service does not answer quickly."""
    given = {name: value for name, value in context.params.items() if value}
    shared = {field.name for field in dataclasses.fields(Connection)}
    connection = Connection(**{name: given[name] for name in shared & given.keys()})
    address = {service: given.get(service, default)}
    try:
        with connection.quick_client(**address) as client:
            return list(islice(read(client, connection.tenant), MAX_NAMES))
    except (LoadoutError, CommandFailed):
        return []


AdapterName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="[tenant/]name of the adapter.", autocompletion=adapter_names
    ),
]
