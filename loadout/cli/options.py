"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from loadout.cli.help import CONNECTION

DEFAULT_STORE = "127.0.0.1:7070"
DEFAULT_STORE_METRICS = "127.0.0.1:7071"
DEFAULT_INFERENCE = "127.0.0.1:7080"
DEFAULT_INFERENCE_METRICS = "127.0.0.1:7081"

Store = Annotated[
    str,
    typer.Option(
        envvar="LOADOUT_STORE",
        metavar="ADDR",
        help="Address of the adapter store. Separate replicas by commas.",
        rich_help_panel=CONNECTION,
    ),
]
Inference = Annotated[
    str,
    typer.Option(
        envvar="LOADOUT_INFERENCE",
        metavar="ADDR",
        help="Address of the inference service. Separate replicas by commas.",
        rich_help_panel=CONNECTION,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
