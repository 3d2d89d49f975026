"""`loadout top`: a live view of both services."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, TypeVar

import typer
from rich.live import Live

from loadout.cli import options
from loadout.cli.connection import Connection, connects, only_replica
from loadout.cli.failure import CommandFailed
from loadout.cli.output import table_console
from loadout.cli.top_view import MAX_RESIDENTS, Look, render
from loadout.client import Client
from loadout.errors import LoadoutError
from loadout.prometheus import scrape

EXAMPLES = """\b
Examples:
  loadout top
  loadout top --once
  loadout top --interval 10 | tee -a top.log
"""

TIMEOUT_S = 3.0

T = TypeVar("T")


@connects
def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one look and end; so it does in a pipe.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two looks.")
    ] = 1.0,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    inference_metrics: Annotated[
        str,
        typer.Option(
            envvar="LOADOUT_INFERENCE_METRICS",
            metavar="ADDR",
            help="Prometheus address of the inference service.",
        ),
    ] = options.DEFAULT_INFERENCE_METRICS,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Watch one replica and the store live.

    Throughput, queue, latencies, memory, tiers, loads in progress, the busiest and the resident
    adapters, and the store with its replicas. Rates are of the time between two looks.
    """
    console = table_console()
    replica = only_replica(inference)
    with (
        connection.client(inference=replica, store=store, timeout_s=TIMEOUT_S) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        before = look(client, inference_metrics, pool)
        if once or not sys.stdout.isatty():
            if not isinstance(before.metrics, LoadoutError):
                time.sleep(interval)
            now = look(client, inference_metrics, pool)
            console.print(render(now, before))
            if failure := next((p for p in now.parts if isinstance(p, LoadoutError)), None):
                raise CommandFailed(str(failure))
            return
        with Live(render(before), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                now = look(client, inference_metrics, pool)
                live.update(render(now, before), refresh=True)
                before = now


def look(client: Client, inference_metrics: str, pool: ThreadPoolExecutor) -> Look:
    """All is asked at once: what does not answer holds up nothing else."""
    server = pool.submit(_ask, client.server_info)
    residents = pool.submit(_ask, lambda: client.residents(MAX_RESIDENTS))
    metrics = pool.submit(_ask, lambda: scrape(inference_metrics))
    store = pool.submit(_ask, client.store_status)
    return Look(
        server.result(), residents.result(), metrics.result(), store.result(), time.monotonic()
    )


def _ask(question: Callable[[], T]) -> T | LoadoutError:
    try:
        return question()
    except LoadoutError as error:
        return error
