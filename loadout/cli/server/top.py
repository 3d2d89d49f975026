"""`loadout top`: a live view of both services."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.live import Live

from loadout.cli import options
from loadout.cli.connection import Connection, connects, only_replica
from loadout.cli.help import CONNECTION
from loadout.cli.output import CommandFailed, error_text, print_json, table_console
from loadout.cli.server.top_overview import Sample, overview
from loadout.cli.server.top_view import MAX_RESIDENTS, View
from loadout.client import Client
from loadout.errors import LoadoutError, Unavailable
from loadout.prometheus import scrape
from loadout.types import ServerInfo

EXAMPLES = """\b
Examples:
  loadout top
  loadout top --once
  loadout top --json | jq .traffic.rates
"""

TIMEOUT_S = 3.0

T = TypeVar("T")


@connects
def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one view and exit, as in a pipe.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two samples.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one sample as JSON and exit.")
    ] = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    inference_metrics: Annotated[
        str | None,
        typer.Option(
            envvar="LOADOUT_INFERENCE_METRICS",
            metavar="ADDR",
            help="Prometheus address of the inference service. Default: the port that the "
            "service reports, on the host of --inference.",
            rich_help_panel=CONNECTION,
        ),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Watch one replica and the store live.

    Shows throughput, queue, latencies, memory, tiers, loads in progress, the busiest resident
    adapters, and the store with its replicas. Rates cover the time between two samples.
    """
    console = table_console()
    replica = only_replica(inference)
    view, place = View(replica), MetricsPlace(replica, inference_metrics)
    with (
        connection.client(inference=replica, store=store, timeout_s=TIMEOUT_S) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        before = take_sample(client, place, pool)
        if once or as_json or not sys.stdout.isatty():
            if not isinstance(before.metrics, LoadoutError):
                time.sleep(interval)
            now = take_sample(client, place, pool)
            if as_json:
                print_json(overview(now, before))
            else:
                console.print(view.update(overview(now, before)))
            if now.errors:
                raise CommandFailed(error_text(now.errors[0]))
            return
        _watch(view, console, before, _samples(client, place, pool, interval))


def _watch(view: View, console: Console, before: Sample, samples: Iterable[Sample]) -> None:
    """Fills the screen with each sample."""
    first = dataclasses.replace(view.update(overview(before)), fills=True)
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        for now in samples:
            screen = dataclasses.replace(view.update(overview(now, before)), fills=True)
            live.update(screen, refresh=True)
            before = now


def _samples(
    client: Client, place: MetricsPlace, pool: ThreadPoolExecutor, interval_s: float
) -> Iterator[Sample]:
    """Yields a sample after each interval, for ever."""
    while True:
        time.sleep(interval_s)
        yield take_sample(client, place, pool)


class MetricsPlace:
    """The address of a replica's metrics: as given, else from the port that the replica says."""

    def __init__(self, replica: str, given: str | None) -> None:
        self._replica = replica
        self._address = given

    def address(self, server: Future[ServerInfo | LoadoutError]) -> str:
        """Returns it; if it is unknown, waits for the answer of `server`. Raises LoadoutError."""
        if self._address is None:
            info = server.result()
            if isinstance(info, LoadoutError):
                raise info
            host = self._replica.rpartition(":")[0]
            if not info.metrics_port or not host or "/" in host:
                raise Unavailable(
                    f"{self._replica} does not say where its metrics are: name --inference-metrics"
                )
            self._address = f"{host}:{info.metrics_port}"
        return self._address


def take_sample(client: Client, place: MetricsPlace, pool: ThreadPoolExecutor) -> Sample:
    """Reads everything at once: a part that does not answer delays nothing else, except for the
    server whose metrics have not been found yet."""
    server = pool.submit(_try, client.server_info)
    residents = pool.submit(_try, lambda: client.residents(MAX_RESIDENTS))
    metrics = pool.submit(_try, lambda: scrape(place.address(server)))
    store = pool.submit(_try, client.store_status)
    return Sample(
        server.result(), residents.result(), metrics.result(), store.result(), time.monotonic()
    )


def _try(read: Callable[[], T]) -> T | LoadoutError:
    try:
        return read()
    except LoadoutError as error:
        return error
