"""`loadout convert`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from loadout.cli.service_code import run_service_code
from loadout.upload import open_folder

EXAMPLES = """\b
Examples:
  loadout convert ./out/french ./french --initial ./out/french-initial
  loadout convert ./out/french ./french --model ./Qwen3-0.6B
"""


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A folder as PEFT saves one; it stays as it is.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The base model's folder: what PiSSA and OLoRA began with is computed from it.",
        ),
    ] = None,
    initial: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The adapter as it was saved before training."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Convert even if training seems to have begun otherwise."),
    ] = False,
) -> None:
    """Make an adapter of a changed base a plain LoRA.

    PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ change the base weights before training. Subtracts what
    they began with, which takes twice the rank. PiSSA and OLoRA need --initial or --model, the
    others --initial.
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
    """Returns what is said of a conversion."""
    (rank, new_rank), (size, new_size) = report["rank"], map(decimal, report["num_bytes"])
    method = report["initialisation"]
    began = "it" if method == "true" else method
    base = report["base_model"] or "a base model that it does not name"
    lines = [
        f"{target}: a plain LoRA of {base}",
        f"{report['num_modules']} modules, rank {rank} -> {new_rank}, {size} -> {new_size}; "
        f"training changed {100 * report['change']:.2g} % of what {began} began with",
    ]
    if report["kept"]:
        lines.append(f"as they were, since nothing was taken out: {', '.join(report['kept'])}")
    if report["left_out"]:
        lines.append(f"left out, base weights saved along: {', '.join(report['left_out'])}")
    if method == "loftq":
        lines.append(
            "note: it was trained over quantised weights; over plain ones it computes the same but "
            "for what LoftQ's rank left of their error"
        )
    return lines
