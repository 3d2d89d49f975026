"""`loadout bench`: how fast a running server is, and whether it was faster before."""

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

from loadout.benchmark.compare import differences, verdicts
from loadout.benchmark.measure import Figures, run
from loadout.benchmark.result import BadResult, Result, conditions_of, parse
from loadout.benchmark.tolerances import read_tolerances
from loadout.benchmark.workload import Workload
from loadout.cli import bench_adapters, options
from loadout.cli.bench_tables import comparison_table, figures_table
from loadout.cli.connection import Connection, connects
from loadout.cli.failure import CommandFailed
from loadout.cli.output import table_console
from loadout.cli.output_file import new_file
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
    typer.Option(metavar="REF", help="Ask for this one too; may be repeated. See the next."),
]
NumAdapters = Annotated[
    int, typer.Option(min=0, help="Without --adapter: the first so many that are ready. 0: none.")
]
NumRequests = Annotated[int, typer.Option(min=1, help="In a round.")]
NumInFlight = Annotated[int, typer.Option(min=1, help="At once.")]
NumRounds = Annotated[
    int, typer.Option(min=1, help="Whose medians count; one more goes before them.")
]
PromptChars = Annotated[int, typer.Option(min=1, help="Of each prompt.")]
NumTokens = Annotated[int, typer.Option(min=2, help="Of each answer.")]
NumLoads = Annotated[
    int,
    typer.Option(
        min=0,
        help="Adapters to unload and load again in each round, of those that are not pinned; for "
        "operators. 0: none.",
    ),
]
BaselineFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Fail if something is slower than what --out wrote."),
]
Tolerances = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[METRIC=]SHARE",
        help="How much worse it may be, such as 10%, for all or one metric; may be repeated.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Compare with a baseline of other conditions, too.")
]
OutFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the figures here, as JSON.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")
]
Demo = Annotated[
    bool, typer.Option("--demo", help="Start the demo's services for it, and stop them after.")
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the services are, and how to connect."""

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
    as_json: AsJson = False,
    demo: Demo = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Measure a running server, and compare with a baseline.

    Requests for the base model and adapters, mixed, as callers see them; nothing else should run.
    Fails if a metric is worse than the baseline by more than its tolerance, or if the baseline is
    of another workload, model, or machine.
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
        table_console().print(figures_table(result.rounds, result.figures))
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
    """The demo's services, with its adapters."""
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
    """Before anything is measured."""
    found = differences(before.conditions, conditions)
    if not found:
        return
    shown = "; ".join(f"{each.path} was {each.before!r}, is {each.now!r}" for each in found[:6])
    more = f"; and {len(found) - 6} more" if len(found) > 6 else ""
    message = f"the baseline is of other conditions: {shown}{more}"
    if not force:
        raise CommandFailed(f"{message} (--force compares all the same)")
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
        table_console().print(comparison_table(found))
    worse = [each.metric for each in found if each.is_regression]
    if missing:
        raise CommandFailed(f"the baseline has {', '.join(missing)}, which was not measured now")
    if worse:
        listed = ", ".join(
            f"{each.metric} by {each.worse_by:.0%}" for each in found if each.is_regression
        )
        raise CommandFailed(
            f"{len(worse)} of {len(found)} metrics are worse than the baseline: {listed}"
        )
