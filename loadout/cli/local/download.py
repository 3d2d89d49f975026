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
  loadout download Qwen/Qwen3-0.6B@c1899de289a04d12100db370d81485cdf75e47ca
"""


def download(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@REVISION]",
            help="Name of the model, such as Qwen/Qwen3-0.6B. REVISION is a commit, tag or branch.",
        ),
    ],
) -> None:
    """Download a model from the Hugging Face Hub.

    Downloads config, tokenizer and safetensors files to the Hub's cache, unless they are there, and
    prints the folder. `loadout serve --model NAME` then finds the model. HF_HOME, HF_ENDPOINT,
    HF_TOKEN and HF_HUB_OFFLINE work as usual. The Hub may redirect the download to huggingface.co,
    hf.co and their subdomains, or to the hosts in LOADOUT_HF_REDIRECT_HOSTS instead.

    Without a revision you get the newest one, and it stays in the cache unchanged. To pin a model,
    name its commit, here and in `loadout serve --model NAME@COMMIT`.
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
