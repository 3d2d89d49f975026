"""`loadout verify`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.output import CommandFailed, new_table, print_json, table_console
from loadout.client import Client
from loadout.verify.prompts import DEFAULT_PROMPTS, read_prompts

if TYPE_CHECKING:
    from loadout.verify.run import Verification

EXAMPLES = """\b
Examples:
  loadout verify french --reference ./out/french
  loadout verify acme/support@3 --reference ./out/support --model ./Qwen3-0.6B
  loadout verify french --reference ./out/french --prompts prompts.txt --json
"""
MAX_SHOWN = 40


@connects
def verify(
    name: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="The served adapter: [tenant/]name[@version] or sha256:<hex>."
        ),
    ],
    reference: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of the adapter in PEFT's format, as trained."),
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Its base model: a folder, a name in the Hub's cache, or a GGUF file. Default: "
            "the adapter's.",
        ),
    ] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=r"Prompts, one per line; \n in a line is a new line. Use prompts like its "
            "training data. Default: eight general ones.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, max=1024, help="Most tokens per answer.")
    ] = 32,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Verify that a served adapter is your trained adapter.

    Asks the service for greedy answers and their log probabilities, and computes the same with
    transformers and PEFT on this machine, in fp32 and in the service's dtype. Fails if they differ
    by more than rounding explains, and says whether the base model or the adapter is the cause.
    """
    with connection.client(inference=inference) as client:
        report = _report(client, name, reference, model, prompts, max_tokens)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report.fault:
        raise CommandFailed(report.fault)
    if not as_json:
        typer.echo(f"verified: {name} is the adapter in {reference}")


def _report(
    client: Client, name: str, reference: Path, model: str, prompts: Path | None, max_tokens: int
) -> Verification:
    if find_spec("peft") is None:
        raise CommandFailed("the reference needs PEFT: pip install 'loadout[verify]'")
    from loadout.verify import run  # torch and transformers, which take a while to import
    from loadout.verify.reference import BadReference, check_folder

    console = Console(stderr=True, highlight=False)
    try:
        base_model = model or check_folder(reference)
        if not base_model:
            raise CommandFailed(f"{reference} names no base model: give --model")
        texts = read_prompts(prompts) if prompts else DEFAULT_PROMPTS
        return run.verify(client, name, reference, base_model, texts, max_tokens, console.print)
    except (ValueError, BadReference, run.WrongTokens) as error:
        raise CommandFailed(str(error)) from error


def _print(report: Verification) -> None:
    number = ("tokens", "other", "wrong", "difference", "rounding", "effect")
    table = new_table("prompt", *number, right=number)
    rows = [
        (row.prompt, str(row.tokens), str(row.other_tokens), str(row.wrong_tokens), row.measured)
        for row in report.prompts
    ]
    for prompt, *counts, measured in [*rows, ("all", "", "", "", report.adapter)]:
        errors = (measured.error, measured.rounding, measured.effect)
        table.add_row(_short(prompt), *counts, *(f"{each:.4f}" for each in errors))
    base = (report.base.error, report.base.rounding)
    table.add_row("base model", "", "", "", *(f"{each:.4f}" for each in base), "")
    table_console().print(table)


def _short(prompt: str) -> str:
    text = prompt.replace("\n", "\\n")
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
