"""`loadout bench`: measures a running server, and compares with an earlier result."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadout.benchmark.compare import Verdict, differences, read_tolerances, verdicts
from loadout.benchmark.measure import METRICS, Figures, run
from loadout.benchmark.result import BadResult, Result, conditions_of, parse
from loadout.benchmark.workload import Workload
from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.output import CommandFailed, new_file, new_table, table_console
from loadout.cli.server import bench_adapters
from loadout.client import Client
from loadout.demo.adapters import ADAPTERS, MODEL
from loadout.demo.jobs import ADAPTER_JOBS, BASE_MODEL
from loadout.demo.process import ProcessFailed
from loadout.demo.system import System, SystemSettings

EXAMPLES = """\b
Examples:
  loadout bench
  loadout bench --demo --out baseline.json
  loadout bench --demo --baseline baseline.json --tolerance 15%
  loadout bench --adapter french --adapter acme/support --tolerance first_token_p99_seconds=50%
"""

NUM_ADAPTERS = 8
DEFAULTS = Workload()


AdapterRefs = Annotated[
    list[str] | None,
    typer.Option(metavar="REF", help="Adapter to send requests for. You can repeat this option."),
]
NumAdapters = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Number of adapters if you give no --adapter: the first that are ready.",
    ),
]
NumRequests = Annotated[int, typer.Option(metavar="N", min=1, help="Number of requests per round.")]
NumInFlight = Annotated[
    int, typer.Option(metavar="N", min=1, help="Number of concurrent requests.")
]
NumRounds = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Number of measured rounds, after one warm-up round."),
]
PromptChars = Annotated[
    int, typer.Option(metavar="N", min=1, help="Number of characters per prompt.")
]
NumTokens = Annotated[int, typer.Option(metavar="N", min=2, help="Number of tokens per response.")]
NumLoads = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Number of unpinned adapters to unload and load again per round. Needs the role"
        " operator.",
    ),
]
BaselineFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Fail if a metric is worse than in this file, which --out wrote."
    ),
]
Tolerances = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[METRIC=]SHARE",
        help="Allowed worsening of a metric, such as 10%. You can repeat this option.",
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Compare even if the baseline was measured under other conditions."
    ),
]
OutFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the result to this file, as JSON.")
]
Demo = Annotated[
    bool,
    typer.Option(
        "--demo", help="Measure the demo's services, which are started and stopped for this."
    ),
]


@dataclass(frozen=True, slots=True)
class Place:
    """The addresses of the services, and how to connect."""

    inference: str
    store: str
    connection: Connection


@connects
def bench(
    adapter: AdapterRefs = None,
    num_adapters: NumAdapters = NUM_ADAPTERS,
    requests: NumRequests = DEFAULTS.num_requests,
    in_flight: NumInFlight = DEFAULTS.num_in_flight,
    rounds: NumRounds = DEFAULTS.num_rounds,
    prompt_chars: PromptChars = DEFAULTS.prompt_chars,
    max_tokens: NumTokens = DEFAULTS.num_tokens,
    loads: NumLoads = DEFAULTS.num_loads,
    baseline: BaselineFile = None,
    tolerance: Tolerances = None,
    force: Force = False,
    out: OutFile = None,
    as_json: options.Json = False,
    demo: Demo = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Measure a running server and compare with a baseline.

    Sends mixed requests for the base model and adapters; run nothing else meanwhile. Fails if a
    metric is worse than the baseline by more than its tolerance, or if the baseline was measured
    with another workload, model or machine.
    """
    workload = Workload(requests, in_flight, rounds, prompt_chars, max_tokens, loads)
    tolerances = read_tolerances(tolerance or [])
    before = None if baseline is None else _read(baseline)
    place = Place(inference, store, connection)
    with _demo_system() if demo else nullcontext(place) as found:
        result = _measure(found, workload, adapter or [], num_adapters, before, force=force)
    if out is not None:
        with new_file(out) as file:
            file.write(result.to_json().encode())
    if as_json:
        typer.echo(result.to_json())
    else:
        table_console().print(_figures_table(result.rounds, result.figures))
    if before is not None:
        _compare(before.figures, result.figures, tolerances, shows_table=not as_json)


def _measure(
    place: Place,
    workload: Workload,
    named: list[str],
    num_adapters: int,
    before: Result | None,
    *,
    force: bool,
) -> Result:
    with place.connection.client(inference=place.inference, store=place.store) as client:
        server = client.server_info()
        chosen = bench_adapters.choose(client, server.layout_id, named, num_adapters)
        loaded = bench_adapters.loadable(client, chosen, workload.num_loads)
    refs = [each.ref for each in chosen]
    conditions = conditions_of(workload, server, [each.shape for each in chosen])
    if before is not None:
        _check_conditions(before, conditions, force=force)
    measured = asyncio.run(_run(place, workload, refs, loaded))
    time = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"time": time, "versions": dict(server.versions), "adapters": refs}
    return Result(conditions, facts, measured)


def _read(path: Path) -> Result:
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except BadResult as error:
        raise CommandFailed(f"--baseline: {path} {error}") from error


@contextmanager
def _demo_system() -> Iterator[Place]:
    """Starts the demo's services and registers its adapters."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="loadout-bench-") as folder,
            System(SystemSettings(MODEL, BASE_MODEL), Path(folder)) as system,
        ):
            addresses = system.addresses
            with Client(store=addresses.store) as client:
                for job in ADAPTER_JOBS:
                    client.register(job.name, ADAPTERS / job.name, base_model=BASE_MODEL)
            yield Place(addresses.inference, addresses.store, Connection())
    except ProcessFailed as failure:
        raise CommandFailed(str(failure)) from failure


def _check_conditions(before: Result, conditions: dict[str, Any], *, force: bool) -> None:
    """Raises CommandFailed, before anything is measured."""
    found = differences(before.conditions, conditions)
    if not found:
        return
    shown = "; ".join(f"{each.path} was {each.before!r}, is {each.now!r}" for each in found[:6])
    more = f"; and {len(found) - 6} more" if len(found) > 6 else ""
    message = f"the baseline was measured under other conditions: {shown}{more}"
    if not force:
        raise CommandFailed(f"{message} (--force compares anyway)")
    typer.echo(message, err=True)


async def _run(
    place: Place, workload: Workload, refs: list[str], loaded: list[str]
) -> list[Figures]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("rounds", total=workload.num_rounds + 1)
        async with place.connection.async_client(inference=place.inference) as client:
            return await run(client, workload, refs, loaded, lambda number: bar.advance(task))


def _compare(
    before: Figures, now: Figures, tolerances: dict[str, float], *, shows_table: bool
) -> None:
    missing = sorted(before.keys() - now.keys())
    found = verdicts(before, now, tolerances)
    if shows_table:
        table_console().print(_comparison_table(found))
    worse = [each.metric for each in found if each.is_regression]
    if missing:
        raise CommandFailed(
            f"the baseline has {', '.join(missing)}, which this run did not measure"
        )
    if worse:
        listed = ", ".join(
            f"{each.metric} by {each.worse_by:.0%}" for each in found if each.is_regression
        )
        raise CommandFailed(
            f"{len(worse)} of {len(found)} metrics are worse than the baseline: {listed}"
        )


def _figures_table(rounds: list[Figures], medians: Figures) -> Table:
    """Returns the median of each metric, and the range of the rounds."""
    numbers = ("median", "lowest", "highest")
    table = new_table("metric", *numbers, right=numbers)
    for name, figure in medians.items():
        values = [each[name] for each in rounds]
        table.add_row(name, *(_format(name, value) for value in (figure, min(values), max(values))))
    return table


def _comparison_table(verdicts: list[Verdict]) -> Table:
    numbers = ("baseline", "now", "change", "tolerance")
    table = new_table("metric", *numbers, "verdict", right=numbers)
    for each in verdicts:
        change = (each.now - each.before) / each.before
        verdict = "worse" if each.is_regression else "ok"
        table.add_row(
            each.metric,
            _format(each.metric, each.before),
            _format(each.metric, each.now),
            f"{change:+.1%}",
            f"{each.tolerance:.0%}",
            verdict,
            style="red" if each.is_regression else None,
        )
    return table


def _format(name: str, value: float) -> str:
    if METRICS[name].unit == "s":
        return f"{value * 1000:.2f} ms"
    return f"{value:.1f} {METRICS[name].unit}"
