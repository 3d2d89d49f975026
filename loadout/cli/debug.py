"""`loadout debug`: one archive of what helps to find out what is wrong."""

from __future__ import annotations

import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from loadout._routing.addresses import split
from loadout.cli import archive, options
from loadout.cli.archive import Member
from loadout.cli.connection import Connection, connects
from loadout.cli.failure import CommandFailed
from loadout.cli.output_file import stamp
from loadout.errors import LoadoutError
from loadout.retry import RetryPolicy

EXAMPLES = """\b
Examples:
  loadout debug
  loadout debug --out incident.tar.gz --inference inference-0:7080,inference-1:7080
"""

TIMEOUT_S = 60.0
"""More than all parts of a service may take together."""
RETRY = RetryPolicy(max_attempts=1)
"""What does not answer now is what one wants to know."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a service answered; `why` it told nothing, or not all."""

    folder: str
    address: str
    members: list[Member]
    seconds: float
    why: str = ""


@connects
def debug(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The archive. Default: loadout-debug-TIME.tar.gz, here."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For each service to answer.")
    ] = TIMEOUT_S,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Collect what helps to find out what is wrong.

    Of both services: settings, versions, slots and extents, residency, queue, work in progress,
    metrics and the last errors. Neither secrets nor prompts are in it. Needs the roles operator and
    admin for all tenants; what a service does not tell, the archive says why.
    """
    name = f"loadout-debug-{stamp()}"
    path = out or Path(f"{name}.tar.gz")
    asked = _ask_all(inference, store, connection, timeout)
    members = [archive.json_member("client.json", _client_facts(asked))]
    members += [member for each in asked for member in each.members]
    size_bytes = archive.write(path, name, members)
    typer.echo(f"{path} ({decimal(size_bytes)})")
    for each in asked:
        if each.why:
            typer.echo(f"{each.folder} at {each.address}: {each.why}", err=True)
    if all(each.why for each in asked):
        raise CommandFailed("no service answered; the archive says why")


def _ask_all(inference: str, store: str, connection: Connection, timeout_s: float) -> list[Asked]:
    """At once, so that one that hangs costs no more than its own timeout."""
    replicas = split("inference", inference)
    jobs = [("store", "store", store)]
    for index, address in enumerate(replicas):
        folder = "inference" if len(replicas) == 1 else f"inference-{index}"
        jobs.append((folder, "inference", address))

    def ask(job: tuple[str, str, str]) -> Asked:
        return _ask(*job, connection=connection, timeout_s=timeout_s)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(ask, jobs))


def _ask(
    folder: str, kind: str, address: str, *, connection: Connection, timeout_s: float
) -> Asked:
    start_s = time.monotonic()
    members: list[Member] = []
    why = ""
    try:
        with connection.client(**{kind: address}, retry=RETRY) as client:
            ask = client.store_debug_info if kind == "store" else client.server_debug_info
            for part in islice(ask(timeout_s=timeout_s), archive.MAX_PARTS):
                members.append(archive.member_of(folder, part))
    except (LoadoutError, CommandFailed) as error:
        why = f"{type(error).__name__}: {error}"
        members.append(archive.failure(f"{folder}/rest" if members else folder, why))
    return Asked(folder, address, members, time.monotonic() - start_s, why)


def _client_facts(asked: list[Asked]) -> dict[str, object]:
    services = [
        {
            "folder": each.folder,
            "address": each.address,
            "seconds": each.seconds,
            "why": each.why,
        }
        for each in asked
    ]
    return {
        "loadout": version("loadout"),
        "python": sys.version,
        "system": platform.platform(),
        "services": services,
    }
