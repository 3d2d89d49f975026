"""`loadout download`."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from loadout.cli.signals import sigterm_is_ctrl_c

EXAMPLES = """\b
Examples:
  loadout download Qwen/Qwen3-0.6B
"""


def download(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The model's name, such as Qwen/Qwen3-0.6B.")
    ],
) -> None:
    """Download a model of the Hugging Face Hub.

    Puts what of it is served, config, tokenizer and safetensors, into the hub's cache, unless it is
    there, and prints the folder. `loadout serve --model NAME` then finds it. The hub's variables
    count: HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.

    It is the newest revision; what is downloaded stays as it is until it is removed. For a certain
    one: `hf download NAME --revision COMMIT --local-dir DIR`, then `loadout serve --model DIR`.
    """
    with sigterm_is_ctrl_c():
        typer.echo(fetch_model(name))


def fetch_model(name: str, *, or_folder: bool = False) -> str:
    """Returns the folder of a model of the hub, downloaded if it is not in the hub's cache, by the
    service's own code in a process, which shows the progress. Raises typer.Exit when that has said
    why it cannot be had; `or_folder`: also that there is no folder of that name."""
    flags = ["--or-folder"] if or_folder else []
    done = subprocess.run(
        [sys.executable, "-m", "inference_svc", "download", *flags, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise typer.Exit(1)
    return done.stdout.strip()
