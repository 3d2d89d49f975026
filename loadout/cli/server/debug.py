"""`loadout debug`: one archive of diagnostics for an incident."""

from __future__ import annotations

import io
import json
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from loadout._routing.addresses import split
from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.output import CommandFailed, error_text, new_file, time_stamp
from loadout.errors import LoadoutError
from loadout.retry import RetryPolicy
from loadout.types import DebugPart

EXAMPLES = """\b
Examples:
  loadout debug
  loadout debug --out incident.tar.gz --inference inference-0:7080,inference-1:7080
  loadout debug --store store-0:7070,store-1:7070
"""

TIMEOUT_S = 60.0
"""Longer than all parts of a service may take together."""
RETRY = RetryPolicy(max_attempts=1)
"""A service that does not answer now is a finding."""
MAX_PART_BYTES = 32 << 20
MAX_PARTS = 64
"""Limit per service. Ours have about ten; another program that answers in their place is not
trusted."""
_NAME = re.compile(r"[a-z0-9_]{1,40}\.(json|txt)")


@dataclass(frozen=True, slots=True)
class Member:
    """A file in the archive."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of a service; `why` something is missing."""

    folder: str
    address: str
    members: list[Member]
    seconds: float
    why: str = ""


@connects
def debug(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Archive to write. Default: loadout-debug-TIME.tar.gz in the current folder.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Timeout per service.")
    ] = TIMEOUT_S,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Collect diagnostics of both services in one archive.

    The archive contains settings, versions, metrics, recent errors, resident adapters, queue and
    running work of every replica that you name. It contains no secrets and no prompts. If a service
    does not answer, the archive has the reason. Needs the roles operator and admin for all tenants.
    """
    name = f"loadout-debug-{time_stamp()}"
    path = out or Path(f"{name}.tar.gz")
    reports = _collect_all(inference, store, connection, timeout)
    members = [_json_member("client.json", _client_facts(reports))]
    members += [member for each in reports for member in each.members]
    size_bytes = _write(path, name, members)
    typer.echo(f"{path} ({decimal(size_bytes)})")
    for each in reports:
        if each.why:
            typer.echo(f"{each.folder} at {each.address}: {each.why}", err=True)
    if all(each.why for each in reports):
        raise CommandFailed("no service answered; the archive has the reasons")


def _collect_all(
    inference: str, store: str, connection: Connection, timeout_s: float
) -> list[Report]:
    """Reads from all at once, so that a hanging one costs no more than its own timeout."""
    jobs = []
    for kind, given in (("store", store), ("inference", inference)):
        addresses = split(kind, given)
        for index, address in enumerate(addresses):
            folder = kind if len(addresses) == 1 else f"{kind}-{index}"
            jobs.append((folder, kind, address))

    def collect(job: tuple[str, str, str]) -> Report:
        return _collect(*job, connection=connection, timeout_s=timeout_s)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(collect, jobs))


def _collect(
    folder: str, kind: str, address: str, *, connection: Connection, timeout_s: float
) -> Report:
    start_s = time.monotonic()
    members: list[Member] = []
    why = ""
    try:
        with connection.client(**{kind: address}, retry=RETRY) as client:
            stream = client.store_debug_info if kind == "store" else client.server_debug_info
            for part in islice(stream(timeout_s=timeout_s), MAX_PARTS):
                members.append(_member_of(folder, part))
    except (LoadoutError, CommandFailed) as error:
        text = error_text(error) if isinstance(error, LoadoutError) else str(error)
        why = f"{type(error).__name__}: {text}"
        members.append(_missing(f"{folder}/rest" if members else folder, why))
    return Report(folder, address, members, time.monotonic() - start_s, why)


def _client_facts(reports: list[Report]) -> dict[str, object]:
    services = [
        {
            "folder": each.folder,
            "address": each.address,
            "seconds": each.seconds,
            "why": each.why,
        }
        for each in reports
    ]
    return {
        "loadout": version("loadout"),
        "python": sys.version,
        "system": platform.platform(),
        "services": services,
    }


def _member_of(folder: str, part: DebugPart) -> Member:
    """Returns the file of a part; without content it says why."""
    if not _NAME.fullmatch(part.name):
        return _missing(f"{folder}/part", "a part with a bad name")
    path = f"{folder}/{part.name}"
    if part.error or len(part.content) > MAX_PART_BYTES:
        return _missing(path, part.error or f"more than {MAX_PART_BYTES} bytes")
    return Member(path, part.content)


def _missing(path: str, why: str) -> Member:
    """Returns a file that stands in place of `path`."""
    return Member(f"{path}.missing.txt", f"{why}\n".encode())


def _json_member(path: str, value: Any) -> Member:
    return Member(path, json.dumps(value, indent=1, default=str).encode())


def _write(path: Path, folder: str, members: Iterable[Member]) -> int:
    """Writes a tar.gz with everything in `folder`. Returns its size in bytes; raises OSError."""
    with new_file(path) as file:
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
            for member in members:
                info = tarfile.TarInfo(f"{folder}/{member.path}")
                info.size, info.mode, info.mtime = len(member.content), 0o600, int(time.time())
                archive.addfile(info, io.BytesIO(member.content))
        return file.tell()
