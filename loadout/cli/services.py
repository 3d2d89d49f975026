"""`loadout store` and `loadout serve`: this process becomes the service.

All flags that are not named here go to the service as they are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from loadout.cli import options

PASS_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": True,
}
"""Settings of a command whose unknown flags belong to the service."""

STORE_EXAMPLES = """\b
Examples:
  loadout store --source-roots /srv/adapters
  loadout store --listen 0.0.0.0:7070 --s3-buckets adapters --data-dir /var/lib/loadout
"""

SERVE_EXAMPLES = """\b
Examples:
  loadout serve --model ./Qwen3-0.6B
  loadout serve --model /models/llama --base-model meta-llama/Llama-3.1-8B --max-loras 128
"""

HelpFlag = Annotated[
    bool, typer.Option("--help", "-h", help="Show this, and all flags of the service.")
]


def run_store(context: typer.Context, help_wanted: HelpFlag = False) -> None:
    """Run the adapter store.

    It fetches, validates and keeps adapters, and compiles and streams their images.
    """
    if help_wanted:
        _show_help(context)
    _become("adapter_store", [*context.args, *_help_flag(help_wanted)])


def run_serve(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the base model, as Hugging Face saves one."),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    base_model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name that adapters know the model by, if not DIR's."),
    ] = "",
    help_wanted: HelpFlag = False,
) -> None:
    """Run the inference service.

    It serves one base model, and any mix of its adapters in one batch.
    """
    if help_wanted:
        _show_help(context)
        _become("inference_svc", ["--help"])
    if model is None:
        raise typer.BadParameter("is needed", param_hint="--model")
    flags = ["--model", str(model), "--store", store]
    if base_model:
        flags += ["--base-model", base_model]
    _become("inference_svc", [*flags, *context.args])


def _show_help(context: typer.Context) -> None:
    typer.echo(context.get_help())
    typer.echo("\nThe service's own flags:\n")
    sys.stdout.flush()


def _help_flag(wanted: bool) -> list[str]:
    return ["--help"] if wanted else []


def _become(module: str, arguments: list[str]) -> None:
    """Replaces this process, so that signals and the exit code are the service's own."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
