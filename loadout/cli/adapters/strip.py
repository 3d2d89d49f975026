"""`loadout strip`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadout.cli.local.service_code import run_service_code
from loadout.upload import open_folder

EXAMPLES = """\b
Examples:
  loadout strip ./out/french ./french
  loadout strip ./out/french ./french --model ./Qwen3-0.6B
"""


def strip(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="Folder of the adapter in PEFT's format. It is not changed."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the base model, to compare the weights."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also strip weights that differ from the base model's.")
    ] = False,
) -> None:
    """Copy an adapter without its base weights.

    PEFT also saves the embedding and the head if they were adapted or resized. With --model, the
    command compares each with the base model's weights. It makes no copy if one differs, because
    the copy would compute something else.
    """
    paths = [open_folder(source).path, target, *([] if model is None else [model])]
    arguments = [*map(str, paths), *(["--force"] if force else [])]
    typer.echo(run_service_code("adapter_store", "strip", *arguments))
