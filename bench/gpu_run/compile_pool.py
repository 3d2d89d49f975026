"""Runs jobs such as compilation in many processes at once, until a deadline."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from bench.gpu_run.context import Context, Found
from bench.gpu_run.timing import Deadline
from kernels import tuning

MAX_PROCESSES = 14
ENDLESS_S = 3600.0
"""A job has no deadline of its own, because the caller ends the processes."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    seconds: float,
    on_result: Callable[[Result], None],
) -> Found:
    """Calls `function`, which pickles, with each job in some process, until the time is over.
    Raises the function's exception."""
    deadline = Deadline(seconds)
    num_processes = max(1, min(MAX_PROCESSES, len(jobs), os.cpu_count() or 1))
    num_done = 0
    # A process that uses the device must not fork, so these are spawned. The context ends them.
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        results = pool.imap_unordered(function, jobs)
        while num_done < len(jobs) and not deadline.is_near():
            try:
                on_result(results.next(timeout=max(0.01, deadline.left_s)))
            except multiprocessing.TimeoutError:
                break
            num_done += 1
    return {"processes": num_processes, "jobs": len(jobs), "done": num_done, "seconds": seconds}


def context_of_job(pack: Path) -> Context:
    """Returns the context of a job in its own process, with a real device."""
    torch.set_num_threads(1)
    tuning.use_device(torch.cuda.get_device_name())
    return Context.make(
        is_emulated=False, seconds=ENDLESS_S, pack=pack, out=Path(), found={}, save=_forget
    )


def _forget(found: Found) -> None:
    """Does nothing, because the stage's own process saves."""
