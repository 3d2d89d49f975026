"""`loadout quantize`."""

from __future__ import annotations

import enum
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from loadout.cli.local.download import fetch_model
from loadout.cli.signals import sigterm_is_ctrl_c

EXAMPLES = """\b
Examples:
  loadout quantize ./llama-3-8b ./llama-3-8b-int4
  loadout quantize Qwen/Qwen3-0.6B ./qwen3-fp8 --to fp8
"""


class WeightType(enum.StrEnum):
    """The types that weights can be written in."""

    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"


def quantize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="The model's folder, or its name on the Hub."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write. It must not exist.")],
    to: Annotated[
        WeightType,
        typer.Option(
            metavar="|".join(WeightType),
            help="Type of the weights. int4: in groups of up to 128.",
        ),
    ] = WeightType.INT4,
) -> None:
    """Write a copy of a model with weights in few bits.

    The result is a compressed-tensors checkpoint, which Loadout and transformers open. vLLM's CPU
    build computes int4 alone, and needs AVX-512 for it. Weights are rounded to the nearest value;
    embedding, head, norms and routers stay as they are. Your adapters go on working: images do not
    depend on the base model's quantisation.

    Takes the memory of one file of the result, at most about 2 GB, and no GPU. To quantise while a
    server starts instead, and keep one copy on disk, start it with --quantize.
    """
    with sigterm_is_ctrl_c():
        folder = model if Path(model).is_dir() else fetch_model(model, or_folder=True)
        command = [sys.executable, "-m", "inference_svc", "quantize", to, folder, str(out)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise typer.Exit(1)
    typer.echo(str(out))
