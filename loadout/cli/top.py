"""`loadout top`: a live view of both services."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.failure import CommandFailed
from loadout.cli.output import table_console
from loadout.client import Client
from loadout.errors import LoadoutError
from loadout.prometheus import Metrics, scrape
from loadout.types import ResidentAdapter, ServerInfo, StoreStatus, TierStatus

EXAMPLES = """\b
Examples:
  loadout top
  loadout top --once
"""

TIMEOUT_S = 3.0
MAX_ROWS = 20
HOST_MEMORY = ("host_tier", "process", "frontend")
"""What lies on the host also when a GPU computes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class View:
    """One look at the system; what did not answer is an error in its place."""

    server: ServerInfo | LoadoutError
    residents: tuple[ResidentAdapter, ...] | LoadoutError
    metrics: Metrics | LoadoutError
    store: StoreStatus | LoadoutError


@connects
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
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
    """Watch both services live.

    Memory, requests and resident adapters of the inference service, and the store's tiers.
    """
    console = table_console()
    with connection.client(inference=inference, store=store, timeout_s=TIMEOUT_S) as client:
        view = look(client, inference_metrics)
        if once:
            console.print(render(view))
            if failure := next(
                (part for part in parts(view) if isinstance(part, LoadoutError)), None
            ):
                raise CommandFailed(str(failure))
            return
        with Live(render(view), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(render(look(client, inference_metrics)), refresh=True)


def look(client: Client, inference_metrics: str) -> View:
    return View(
        server=_ask(client.server_info),
        residents=_ask(client.residents),
        metrics=_ask(lambda: scrape(inference_metrics)),
        store=_ask(client.store_status),
    )


def parts(view: View) -> tuple[object, ...]:
    return (view.server, view.residents, view.metrics, view.store)


def _ask(question: Callable[[], T]) -> T | LoadoutError:
    try:
        return question()
    except LoadoutError as error:
        return error


def render(view: View) -> RenderableType:
    return Group(
        _draw(view.server, _server),
        _draw(view.metrics, _requests),
        _draw(view.residents, _residents),
        _draw(view.store, _store),
    )


def _draw(part: T | LoadoutError, draw: Callable[[T], RenderableType]) -> RenderableType:
    if isinstance(part, LoadoutError):
        return Text(f"no answer: {part}", style="red")
    return draw(part)


def _server(server: ServerInfo) -> RenderableType:
    layout = "" if server.layout_id else "  layout not yet accepted by the store"
    where = " with ".join(filter(None, (server.device, server.kernels)))
    title = Text(f"{server.base_model}  {server.dtype} on {where}{layout}", style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    for use in server.memory:
        share = use.used_bytes / use.capacity_bytes if use.capacity_bytes else 0.0
        table.add_row(
            use.name, f"{decimal(use.used_bytes)} of {decimal(use.capacity_bytes)}", f"{share:.0%}"
        )
    if limit_bytes := server.limits.memory_bytes:
        is_cpu = server.device == "cpu"
        counted = [use for use in server.memory if is_cpu or use.name not in HOST_MEMORY]
        total_bytes = sum(use.capacity_bytes for use in counted)
        table.add_row(
            "total",
            f"{decimal(total_bytes)} of at most {decimal(limit_bytes)}",
            f"{total_bytes / limit_bytes:.0%}",
        )
    return Group(title, table)


def _requests(metrics: Metrics) -> RenderableType:
    running = metrics.sum("vllm:num_requests_running")
    waiting = metrics.sum("vllm:num_requests_waiting")
    return Text(f"requests  {running:.0f} running, {waiting:.0f} waiting\n")


def _residents(residents: tuple[ResidentAdapter, ...]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("resident adapter", "tier", "rank", "size", "requests", "idle", "pinned"):
        right = column in ("rank", "size", "requests", "idle")
        table.add_column(column, justify="right" if right else "left")
    busiest = sorted(residents, key=lambda each: (-each.running_requests, _idle_s(each)))
    for each in busiest[:MAX_ROWS]:
        table.add_row(
            ", ".join(each.names) or each.digest[:19],
            each.tier.value,
            str(each.rank),
            decimal(each.num_bytes),
            str(each.running_requests),
            f"{_idle_s(each):.0f} s",
            "yes" if each.pinned else "",
        )
    hidden = len(residents) - MAX_ROWS
    more = Text(f"and {hidden} more") if hidden > 0 else Text("")
    return Group(table, more) if residents else Text("no adapter is resident\n")


def _idle_s(resident: ResidentAdapter) -> float:
    if resident.last_used_time is None or resident.running_requests:
        return 0.0
    return max(0.0, (datetime.now(UTC) - resident.last_used_time).total_seconds())


def _store(store: StoreStatus) -> RenderableType:
    title = Text(
        f"store  {store.adapters} adapters, {store.layouts} layouts, revision {store.revision}, "
        f"{store.active_pulls} pulls, blobs {decimal(store.blob_bytes)}",
        style="bold",
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("memory", *_tier(store.memory))
    table.add_row("disk", *_tier(store.disk))
    return Group(title, table)


def _tier(tier: TierStatus) -> tuple[str, ...]:
    looked_up = tier.hits + tier.misses
    return (
        f"{decimal(tier.used_bytes)} of {decimal(tier.capacity_bytes)}",
        f"{tier.images} images",
        f"hit rate {tier.hits / looked_up:.0%}" if looked_up else "no look-ups",
        f"{tier.evictions} evictions",
    )
