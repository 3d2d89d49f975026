"""The output of commands: tables, JSON, files, and the one line of a failure."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import typer
from rich.console import Console
from rich.table import Table

from loadout.errors import LoadoutError
from loadout.types import Adapter

_LAYER = re.compile(r"(?P<before>(?:[^.]+\.)*?)(?P<layer>\d+)\.(?P<after>.+)")
PIPED_WIDTH = 160
"""Columns in a pipe or a log, where a table must not be cut to a terminal's 80."""


class CommandFailed(Exception):
    """Ends the command with exit code 1; the message is for the user."""


def error_text(error: LoadoutError, hint: str = "") -> str:
    """Returns an error for people, with a hint, and its reason for programs at the end."""
    reason = f" ({error.reason})" if error.reason else ""
    return f"{error}{hint}{reason}"


def table_console() -> Console:
    """Returns a console that prints the services' texts unchanged: names and errors may have
    brackets, which rich would take for markup."""
    width = None if Console().is_terminal else PIPED_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Returns a table without borders; the columns in `right` are aligned right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def to_json(value: Any) -> Any:
    """Returns the client's types as JSON has them: their fields are the keys."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            each.name: to_json(getattr(value, each.name)) for each in dataclasses.fields(value)
        }
        return {"ref": value.ref, **fields} if isinstance(value, Adapter) else fields
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, LoadoutError):
        return {"error": str(value), "code": value.code, "reason": value.reason}
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return value


def print_json(value: Any) -> None:
    typer.echo(json.dumps(to_json(value), indent=1))


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that only its owner may read, and that appears complete or not at all. Raises
    OSError."""
    number, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def time_stamp() -> str:
    """Returns the time for the name of a file."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def split_layer(name: str) -> tuple[str, int | None, str]:
    """Returns the part before a layer's number in a dotted name, the number, and the part after it;
    None and all of the name if it has none."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return "", None, name
    return match["before"], int(match["layer"]), match["after"]


def number_ranges(ascending: Sequence[int]) -> str:
    """Returns numbers as text, neighbours joined: "1-3, 5"."""
    ranges: list[tuple[int, int]] = []
    for number in ascending:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ranges)
