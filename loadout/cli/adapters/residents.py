"""`loadout load`, `unload`, `pin`, `unpin` and `residents`: the adapters in a server's memory."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from loadout._routing.replicas import Endpoint
from loadout.cli import options
from loadout.cli.connection import Connection, connects, only_replica, replicas_of
from loadout.cli.local.completion import adapter_names, resident_names
from loadout.cli.output import (
    CommandFailed,
    error_text,
    new_table,
    print_json,
    table_console,
    to_json,
)
from loadout.cli.server.top_overview import idle_s
from loadout.client import Client
from loadout.errors import FailedPrecondition, LoadoutError, NotFound
from loadout.types import Adapter, ResidentAdapter

LOAD_EXAMPLES = """\b
Examples:
  loadout load french acme/support@3
  loadout load french --pin --every-replica --inference inference-0:7080,inference-1:7080
"""

UNLOAD_EXAMPLES = """\b
Examples:
  loadout unload french
  loadout unload --all
"""

PIN_EXAMPLES = """\b
Examples:
  loadout pin french
  loadout pin french --in both
"""

UNPIN_EXAMPLES = """\b
Examples:
  loadout unpin french
  loadout unpin french --in store
"""

RESIDENTS_EXAMPLES = """\b
Examples:
  loadout residents
  loadout residents --json | jq -r '.[] | select(.pinned) | .names[0]'
"""


class Where(enum.StrEnum):
    """Whose memory an adapter is pinned in."""

    INFERENCE = "inference"
    STORE = "store"
    BOTH = "both"


REF_HELP = "[tenant/]name[@version] or sha256:<hex>. You can give several."
StoreRefs = Annotated[
    list[str],
    typer.Argument(metavar="REF", help=REF_HELP, autocompletion=adapter_names),
]
ResidentRefs = Annotated[
    list[str] | None,
    typer.Argument(metavar="REF", help=REF_HELP, autocompletion=resident_names),
]
In = Annotated[
    Where,
    typer.Option(
        "--in",
        metavar="|".join(Where),
        help="Where: in the inference service's device memory, the store's memory, or both.",
    ),
]
EveryReplica = Annotated[
    bool,
    typer.Option(
        "--every-replica",
        help="Run on every replica. Default: on the replica that gets the adapter's requests.",
    ),
]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Timeout per adapter.")]
TIMEOUT_S = 300.0
ROUTED = "the adapter's replica"
"""Stands for the replica of several that the adapter's requests go to."""


@connects
def load(
    ref: StoreRefs,
    pin: Annotated[
        bool, typer.Option("--pin", help="Also pin the adapters on the device.")
    ] = False,
    every_replica: EveryReplica = False,
    timeout: Timeout = TIMEOUT_S,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Load adapters before their first request.

    Returns when they are resident. Needs the role operator.
    """
    found = []
    at = Targets(inference, connection, every_replica=every_replica)
    for replica, client in at:
        with at.noting_failure(replica):
            for each in ref:
                found.append((replica, client.load(each, pin=pin, timeout_s=timeout)))
    if found:
        _print_residents(found, as_json=as_json)
    at.raise_failures()


@connects
def unload(
    ref: ResidentRefs = None,
    every: Annotated[
        bool, typer.Option("--all", help="Unload every adapter that is not pinned.")
    ] = False,
    every_replica: EveryReplica = False,
    timeout: Timeout = TIMEOUT_S,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Unload adapters and free their memory.

    Running requests finish first. A request that arrives meanwhile loads the adapter again. Needs
    the role operator.
    """
    if bool(ref) == every:
        raise typer.BadParameter("give either adapters or --all", param_hint="REF")
    at = Targets(inference, connection, every_replica=every_replica)
    if every and not every_replica and len(at.replicas) > 1:
        raise CommandFailed("--all with several replicas needs --every-replica")
    freed: list[dict[str, Any]] = []
    kept: list[str] = []
    for replica, client in at:
        with at.noting_failure(replica):
            for name, target in [(each, each) for each in ref or ()] or _evictable(client):
                try:
                    num_bytes = client.unload(target, timeout_s=timeout)
                except (NotFound, FailedPrecondition) as error:
                    if not every:
                        raise
                    kept.append(f"{name}: {error_text(error)}")  # it was evicted, or is loading
                else:
                    freed.append({"replica": replica, "ref": name, "freed_bytes": num_bytes})
    if as_json:
        print_json(freed)
    else:
        for row in freed:
            typer.echo(f"{row['ref']} unloaded, {decimal(row['freed_bytes'])} freed")
        if every and not freed and not at.failures:
            typer.echo("nothing to unload")
    for line in kept:
        typer.echo(line, err=True)
    at.raise_failures()


@connects
def pin(
    ref: StoreRefs,
    where: In = Where.INFERENCE,
    every_replica: EveryReplica = False,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Pin adapters so that they are not evicted.

    In the inference service an adapter must be resident: see `loadout load --pin`. Needs the role
    operator in the inference service and admin in the store.
    """
    places = (inference, store, where)
    _change_pins(ref, places, connection, True, every_replica=every_replica, as_json=as_json)


@connects
def unpin(
    ref: StoreRefs,
    where: In = Where.INFERENCE,
    every_replica: EveryReplica = False,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Unpin adapters so that they can be evicted.

    Needs the role operator in the inference service and admin in the store.
    """
    places = (inference, store, where)
    _change_pins(ref, places, connection, False, every_replica=every_replica, as_json=as_json)


@connects
def residents(
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Maximum number of adapters to list. 0: all.")
    ] = 0,
    every_replica: Annotated[
        bool, typer.Option("--every-replica", help="List the adapters of every replica.")
    ] = False,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """List the adapters in the inference service's memory.

    Lists adapters on the device first. Needs the role operator.
    """
    found: list[tuple[str, ResidentAdapter]] = []
    if not every_replica:
        only_replica(inference)
    at = Targets(inference, connection, every_replica=every_replica)
    for replica, client in at:
        with at.noting_failure(replica):
            found += [(replica, resident) for resident in client.residents(limit)]
    if found or not at.failures:
        _print_residents(found, as_json=as_json)
    at.raise_failures()


class Targets:
    """The replicas that a command goes to, and their failures."""

    def __init__(self, inference: str, connection: Connection, *, every_replica: bool) -> None:
        self._inference = inference
        self._connection = connection
        self._is_every = every_replica
        self.failures: list[str] = []

    @cached_property
    def replicas(self) -> list[Endpoint]:
        """The replicas that --inference stands for; resolved when a command needs them."""
        return replicas_of(self._inference)

    def __iter__(self) -> Iterator[tuple[str, Client]]:
        """Yields an address and a client for it, which is closed afterwards. Without every replica
        the client chooses by the adapter: of several the address is ROUTED."""
        if not self._is_every:
            address = self.replicas[0].address if len(self.replicas) == 1 else ROUTED
            with self._connection.client(inference=self._inference) as client:
                yield address, client
            return
        for replica in self.replicas:
            with self._connection.replica_client(replica) as client:
                yield replica.address, client

    @contextmanager
    def noting_failure(self, replica: str) -> Iterator[None]:
        """Lets the command go on elsewhere, and show the successes."""
        try:
            yield
        except LoadoutError as error:
            text = error_text(error)
            self.failures.append(f"{replica}: {text}" if self._is_every else text)

    def raise_failures(self) -> None:
        """Raises CommandFailed with all failures. Call it once the rest is printed."""
        if self.failures:
            raise CommandFailed("\n".join(self.failures))


def _evictable(client: Client) -> list[tuple[str, str]]:
    """Returns name and digest of the resident adapters that are not pinned."""
    return [(each.label, each.digest) for each in client.residents() if not each.pinned]


def _change_pins(
    refs: list[str],
    places: tuple[str, str, Where],
    connection: Connection,
    pinned: bool,
    *,
    every_replica: bool,
    as_json: bool,
) -> None:
    inference, store, where = places
    at = Targets(inference, connection, every_replica=every_replica)
    on_servers: list[tuple[str, ResidentAdapter]] = []
    in_store: list[Adapter] = []
    if where is not Where.STORE:
        for replica, client in at:
            change: Callable[[str], ResidentAdapter]
            change = client.pin_resident if pinned else client.unpin_resident
            with at.noting_failure(replica):
                for ref in refs:
                    on_servers.append((replica, change(ref)))
    if where is not Where.INFERENCE:
        with connection.client(store=store) as client, at.noting_failure("the store"):
            for ref in refs:
                in_store.append(client.pin(ref) if pinned else client.unpin(ref))
    if as_json:
        print_json({"inference": _rows(on_servers), "store": in_store})
    else:
        verb = "pinned" if pinned else "unpinned"
        for replica, resident in on_servers:
            typer.echo(f"{resident.label} {verb} on the device of {replica}")
        for adapter in in_store:
            typer.echo(f"{adapter.ref} {verb} in the memory of the store")
    at.raise_failures()


def _rows(found: list[tuple[str, ResidentAdapter]]) -> list[dict[str, Any]]:
    return [{"replica": replica, **to_json(resident)} for replica, resident in found]


def _print_residents(found: list[tuple[str, ResidentAdapter]], *, as_json: bool) -> None:
    if as_json:
        print_json(_rows(found))
        return
    if not found:
        typer.echo("no adapter is resident")
        return
    has_several = len({replica for replica, _ in found}) > 1
    numbers = ("rank", "size", "requests", "idle", "loaded in")
    first = ("replica", "adapter", "tier") if has_several else ("adapter", "tier")
    table = new_table(*first, *numbers, "notes", right=numbers)
    for replica, each in found:
        cells = (
            each.label,
            each.tier.value,
            str(each.rank),
            decimal(each.num_bytes),
            str(each.running_requests),
            f"{idle_s(each):.0f} s",
            f"{each.load_seconds * 1000:.0f} ms",
            each.notes,
        )
        table.add_row(*((replica, *cells) if has_several else cells))
    table_console().print(table)
