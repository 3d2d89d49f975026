"""`loadout convert`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from contract.folders import shown
from loadout.cli.local.service_code import run_service_code
from loadout.upload import open_folder

EXAMPLES = """\b
Examples:
  loadout convert ./out/french ./french --initial ./out/french-initial
  loadout convert ./out/french ./french --model ./Qwen3-0.6B
"""


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="Folder of the adapter in PEFT's format. It is not changed."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the base model, to compute the initial adapter of PiSSA and OLoRA.",
        ),
    ] = None,
    initial: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the adapter as saved before training."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Convert even if training seems to have started from another initial adapter.",
        ),
    ] = False,
) -> None:
    """Convert an adapter with a changed base to a plain LoRA.

    PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ change the base weights before training. The command
    subtracts the initial adapter, which doubles the rank. PiSSA and OLoRA need --initial or
    --model, the others --initial.
    """
    arguments = [str(open_folder(source).path), str(target)]
    if model is not None:
        arguments += ["--model", str(model)]
    if initial is not None:
        arguments += ["--initial", str(open_folder(initial).path)]
    if force:
        arguments.append("--force")
    report = json.loads(run_service_code("adapter_store", "convert", *arguments))
    typer.echo("\n".join(_lines(report, target)))


def _lines(report: Mapping[str, Any], target: Path) -> list[str]:
    """Returns the lines about a conversion."""
    (rank, new_rank), (size, new_size) = report["rank"], map(decimal, report["num_bytes"])
    method = report["initialisation"]
    of = "" if method == "true" else f" of {method}"
    base = report["base_model"] or "a base model that it does not name"
    lines = [
        f"{shown(target)}: a plain LoRA of {base}",
        f"{report['num_modules']} modules, rank {rank} -> {new_rank}, {size} -> {new_size}; "
        f"training changed {100 * report['change']:.2g} % of the initial weights{of}",
    ]
    if report["kept"]:
        lines.append(f"unchanged, because nothing was subtracted: {', '.join(report['kept'])}")
    if report["left_out"]:
        lines.append(f"left out, because they are base weights: {', '.join(report['left_out'])}")
    if method == "loftq":
        lines.append(
            "note: it was trained over quantised weights; over plain ones it computes the same "
            "except for the error that LoftQ's rank left"
        )
    return lines
