"""`loadout pause`, `resume`, `sleep` and `wake`: whether servers generate."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from loadout import Client
from loadout.cli import options
from loadout.cli.adapters.residents import Targets
from loadout.cli.connection import Connection, connects
from loadout.cli.output import print_json

PAUSE_EXAMPLES = """\b
Examples:
  loadout pause
  loadout pause --mode wait --resume-after 60
"""

RESUME_EXAMPLES = """\b
Examples:
  loadout resume
"""

SLEEP_EXAMPLES = """\b
Examples:
  loadout sleep
  loadout sleep --weights
"""

WAKE_EXAMPLES = """\b
Examples:
  loadout wake
"""


class Mode(enum.StrEnum):
    """The treatment of running requests."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


@connects
def pause(
    mode: Annotated[
        Mode,
        typer.Option(
            metavar="|".join(Mode),
            help="Running requests are held (keep), finish first (wait) or end with an error "
            "(abort).",
        ),
    ] = Mode.KEEP,
    resume_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Resume automatically after this time. Default: never."
        ),
    ] = None,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Pause generation on every replica.

    All requests wait, including new ones. Adapters are still loaded. Needs the role operator for
    all tenants.
    """

    def ask(client: Client) -> dict[str, Any]:
        return {"held_requests": client.pause(mode.value, resume_after_s=resume_after)}

    at = Targets(inference, connection, every_replica=True)
    _ask_each(at, ask, as_json, lambda row: f"paused; {row['held_requests']} requests wait")


@connects
def resume(
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Resume generation on every replica.

    Requests continue where they stopped. Needs the role operator for all tenants.
    """

    def ask(client: Client) -> dict[str, Any]:
        client.resume()
        return {}

    at = Targets(inference, connection, every_replica=True)
    _ask_each(at, ask, as_json, lambda row: "resumed")


@connects
def sleep(
    weights: Annotated[
        bool, typer.Option("--weights", help="Also free the weights, not only requests' state.")
    ] = False,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Free the memory of every replica until you wake it.

    Running requests are computed again after waking; new requests are refused. Needs the role
    operator for all tenants.
    """

    def ask(client: Client) -> dict[str, Any]:
        return {"freed_bytes": client.sleep(weights=weights)}

    at = Targets(inference, connection, every_replica=True)
    _ask_each(at, ask, as_json, lambda row: f"asleep; {decimal(row['freed_bytes'])} are free")


@connects
def wake(
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Wake every sleeping replica.

    Needs the role operator for all tenants.
    """

    def ask(client: Client) -> dict[str, Any]:
        return {"seconds": client.wake()}

    at = Targets(inference, connection, every_replica=True)
    _ask_each(at, ask, as_json, lambda row: f"awake, in {row['seconds']:.3g} s")


def _ask_each(
    at: Targets,
    ask: Callable[[Client], dict[str, Any]],
    as_json: bool,
    line_of: Callable[[dict[str, Any]], str],
) -> None:
    """Asks every replica, also if some fail, and prints each one's answer."""
    rows: list[dict[str, Any]] = []
    for replica, client in at:
        with at.noting_failure(replica):
            rows.append({"replica": replica, **ask(client)})
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            typer.echo(f"{row['replica']}: {line_of(row)}")
    at.raise_failures()
