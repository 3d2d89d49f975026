"""`loadout profile`: a trace of live steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from loadout.cli import options
from loadout.cli.connection import Connection, connects, only_replica
from loadout.cli.output import CommandFailed, new_file, time_stamp
from loadout.retry import RetryPolicy

EXAMPLES = """\b
Examples:
  loadout profile
  loadout profile --steps 50 --out decode.json.gz
  loadout profile --rank 1
"""

NUM_STEPS = 20
MAX_STEPS = 200
WRITE_S = 120.0
"""Time for the trace to be written and sent, once its steps have run."""


@connects
def profile(
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_STEPS, help="Number of steps to trace.")
    ] = NUM_STEPS,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trace to write. Default: loadout-profile-TIME.json.gz in the current folder.",
        ),
    ] = None,
    rank: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Process to trace, of a server that has several (--tensor-parallel, "
            "--pipeline-parallel): `loadout info` lists them.",
        ),
    ] = 0,
    wait: Annotated[
        float,
        typer.Option(
            min=0.1, max=300, metavar="SECONDS", help="Maximum time to wait for the steps."
        ),
    ] = 30.0,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Trace steps of one replica's running engine.

    Writes a file for ui.perfetto.dev with the parts and operators of each step, and on a GPU the
    kernels. Requests continue meanwhile. Needs the role operator for all tenants.
    """
    replica = only_replica(inference)
    path = out or Path(f"loadout-profile-{time_stamp()}.json.gz")
    num_steps = size_bytes = 0
    # A second attempt would trace other steps.
    with (
        connection.client(inference=replica, retry=RetryPolicy(max_attempts=1)) as client,
        client.profile(steps, rank=rank, wait_s=wait, timeout_s=wait + WRITE_S) as pieces,
        new_file(path) as file,
    ):
        for piece in pieces:
            num_steps += piece.num_steps
            size_bytes += file.write(piece.data)
        if not size_bytes:
            raise CommandFailed("the trace is empty")
    typer.echo(f"{path} ({decimal(size_bytes)}, {num_steps} steps)")
    if num_steps < steps:
        typer.echo(f"only {num_steps} steps ran in {wait:g} s", err=True)
