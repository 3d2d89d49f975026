"""The steps of `loadout demo`, in the order of time."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadout.client import Client
from loadout.demo import report
from loadout.demo.adapters import MODEL, register_all
from loadout.demo.jobs import ADAPTER_JOBS, BASE_MODEL
from loadout.demo.system import Addresses, System, SystemSettings, temporary_work_dir
from loadout.demo.traffic import Answer, plan, send_all
from loadout.prometheus import scrape

NUM_REQUESTS = 200
NUM_IN_FLIGHT = 32
MEMORY_FLAGS = ("--kv-memory", "128MiB", "--adapter-memory", "64MiB")
"""Enough for every request at once, and less than half of a service's default: all of it is written
at the start, which takes a second."""


def demo_settings(folder: Path) -> SystemSettings:
    """Returns settings for the demo's model with an S3 server; `folder` is a source root."""
    return SystemSettings(
        MODEL, BASE_MODEL, s3=True, source_roots=(folder,), inference_flags=MEMORY_FLAGS
    )


def run(
    console: Console,
    num_requests: int = NUM_REQUESTS,
    num_in_flight: int = NUM_IN_FLIGHT,
    work_dir: Path | None = None,
) -> list[report.JobResult]:
    """Runs the demo; returns the result of each job.

    Without a `work_dir` it uses a fresh one and removes it after a good run. Raises ProcessFailed
    or LoadoutError.
    """
    started_s = time.monotonic()
    folder = work_dir or temporary_work_dir()
    sources = folder / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    with _progress(console) as progress:
        start = progress.add_task("starting S3 server, adapter store, inference service", total=1)
        with System(demo_settings(sources), folder) as system:
            progress.update(start, advance=1)
            answers = _serve(system.addresses, sources, num_requests, num_in_flight, progress)
            rates = report.hit_rates(
                scrape(system.addresses.store_metrics), scrape(system.addresses.inference_metrics)
            )
            stop = progress.add_task("shutting down", total=1)
        progress.update(stop, advance=1)
    results = report.by_job(answers)
    console.print(report.table(results))
    console.print("hit rates: " + ", ".join(map(str, rates)), highlight=False)
    seconds = time.monotonic() - started_s
    console.print(f"all services exited with 0; {seconds:.1f} s in all", highlight=False)
    if work_dir is None and all(result.is_good for result in results):
        shutil.rmtree(folder)
    return results


def _serve(
    addresses: Addresses, sources: Path, num_requests: int, num_in_flight: int, progress: Progress
) -> list[Answer]:
    registering = progress.add_task("registering adapters", total=len(ADAPTER_JOBS))
    with Client(store=addresses.store) as client:
        revisions = register_all(
            client, sources, addresses.s3_url, lambda job: progress.advance(registering)
        )
    sending = progress.add_task("sending requests", total=num_requests)
    tasks = plan(num_requests)

    def done(answer: Answer) -> None:
        progress.advance(sending)

    return asyncio.run(send_all(addresses.inference, tasks, revisions, num_in_flight, done))


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)
