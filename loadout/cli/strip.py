"""`loadout strip`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadout.cli.service_code import run_service_code
from loadout.upload import open_folder

EXAMPLES = """\b
Examples:
  loadout strip ./out/french ./french
  loadout strip ./out/french ./french --model ./Qwen3-0.6B
"""


def strip(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A folder as PEFT saves one; it stays as it is.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The base model's folder, to compare the weights with."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Strip what differs from the base model too.")
    ] = False,
) -> None:
    """Copy an adapter without its base weights.

    PEFT saves the embedding and the head along when they are adapted or were resized. With --model,
    says whether each equals the base model's, and makes no copy if one differs: without it the
    adapter would compute something else.
    """
    paths = [open_folder(source).path, target, *([] if model is None else [model])]
    arguments = [*map(str, paths), *(["--force"] if force else [])]
    typer.echo(run_service_code("adapter_store", "strip", *arguments))
