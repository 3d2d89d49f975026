"""Where commands print tables."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 160
"""Columns when nobody looks: in a pipe or a log a table must not be cut to a terminal's 80."""


def table_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)
