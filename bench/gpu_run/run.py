"""Runs the stages one after the other, each in its own process and within its budget."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from bench.gpu_run import goals, results_file
from bench.gpu_run.context import Context, Found
from bench.gpu_run.emulation import on_device
from bench.gpu_run.results_file import Results
from bench.machine import machine

RUNNING, PASSED, FAILED, STOPPED = "running", "passed", "failed", "stopped"
"""States of a stage. A stage is stopped at the end of its budget, with its results so far; it is
running if the whole run was killed."""
SAVE_EVERY_S = 1.0
"""Minimum time between two writes of a running stage's results to the file."""
CLOSING_S = 4.0
"""Maximum part of its budget that a stage reserves to save its results and to end."""


class Stage(NamedTuple):
    """A stage in a module of `bench.gpu_run.stages`. With `can_shrink` it uses all of its time, and
    can do with less."""

    name: str
    module: str
    budget_s: float
    can_shrink: bool = True


STAGES = (
    Stage("env", "env", 20, can_shrink=False),
    Stage("compile", "compile_kernels", 60, can_shrink=False),
    Stage("correct", "correct", 340, can_shrink=False),
    Stage("parity", "parity", 40, can_shrink=False),
    Stage("ranks", "ranks", 90, can_shrink=False),
    Stage("tune", "tune", 110),
    Stage("kernels", "kernels", 70),
    Stage("decode", "decode", 100),
    Stage("prefill", "prefill", 30),
    Stage("loads", "loads", 30),
    Stage("trace", "trace", 15),
    Stage("quantised", "quantised", 30),
    Stage("services", "services", 150, can_shrink=False),
    Stage("pictures", "pictures", 40),
)


EMULATED_PATIENCE = 8
"""Factor of a stage's budget without a device, because such machines are often busy."""


@dataclass(frozen=True)
class Options:
    """Options of a run. With `seconds`, stages that can shrink share the part that the others
    leave; without, each has its whole budget."""

    out: Path
    pack: Path
    stages: tuple[str, ...]
    is_emulated: bool = False
    resume: bool = False
    seconds: float | None = None


def chosen_stages(text: str) -> tuple[str, ...]:
    """Returns the names of stages, in order, from a text such as "0,2-4,trace". Raises
    ValueError."""
    names = [stage.name for stage in STAGES]
    found: set[str] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if part in names:
            found.add(part)
        elif first.isdecimal() and (last.isdecimal() or not dash):
            chosen = names[int(first) : int(last or first) + 1]
            if not chosen:
                raise ValueError(f"--stages {part}: there are 0 to {len(names) - 1}")
            found |= {*chosen}
        else:
            raise ValueError(f"--stages {part}: give numbers, ranges or {', '.join(names)}")
    return tuple(name for name in names if name in found)


def budgets(names: Sequence[str], seconds: float | None) -> dict[str, float]:
    """Returns the seconds of each stage; stages that can shrink do so if needed, and none grows.
    Raises ValueError if the others alone take more than `seconds`."""
    stages = [stage for stage in STAGES if stage.name in names]
    if seconds is None:
        return {stage.name: stage.budget_s for stage in stages}
    fixed_s = sum(stage.budget_s for stage in stages if not stage.can_shrink)
    elastic_s = sum(stage.budget_s for stage in stages if stage.can_shrink)
    share = min(1.0, (seconds - fixed_s) / elastic_s) if elastic_s else 1.0
    if share <= 0 or (not elastic_s and fixed_s > seconds):
        raise ValueError(f"--seconds {seconds:g}: stages {', '.join(names)} need {fixed_s:g}")
    return {s.name: s.budget_s * (share if s.can_shrink else 1.0) for s in stages}


def run_all(options: Options) -> Results:
    """Runs the chosen stages, rewrites the results after each, and returns them."""
    results = results_file.read(options.out) if options.resume else {}
    stages = results.setdefault("stages", {})
    results["machine"] = machine(computes_on_gpu=True)
    results["run"] = {
        "emulated": options.is_emulated,
        "times": "made up, as nothing ran on a device" if options.is_emulated else "measured",
        "seconds_given": options.seconds,
    }
    began_s = time.monotonic()
    patience = EMULATED_PATIENCE if options.is_emulated else 1
    for name, budget_s in budgets(options.stages, options.seconds).items():
        seconds = patience * budget_s
        if options.resume and stages.get(name, {}).get("status") == PASSED:
            print(f"{name}: passed before", flush=True)
            continue
        print(f"{name}: up to {seconds:.0f} s", flush=True)
        stages[name] = run_stage(name, seconds, options, results)
        results["run"]["seconds"] = time.monotonic() - began_s
        results["summary"] = goals.summarize(stages)
        results_file.write(options.out, results)
        print(f"{name}: {stages[name]['status']}, {stages[name]['seconds']:.1f} s", flush=True)
    results["summary"] = goals.summarize(stages)
    results_file.write(options.out, results)
    return results


def run_stage(name: str, seconds: float, options: Options, results: Results) -> Results:
    """Runs one stage in a child process, and kills the child at the end of its budget."""
    found = {key: stage.get("found", {}) for key, stage in results["stages"].items()}
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    child = processes.Process(
        target=_child, args=(name, seconds, options, found, receiver, sender), name=name
    )
    end_s = (began_s := time.monotonic()) + seconds
    child.start()
    sender.close()
    entry: Results = {"status": RUNNING, "found": {}}
    results["stages"][name] = entry
    saved_s = 0.0
    try:
        while receiver.poll(max(0.0, end_s - time.monotonic())):
            entry |= (message := receiver.recv())
            if "status" in message:
                break
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                results_file.write(options.out, results)
                saved_s = time.monotonic()
        else:
            entry |= {"status": STOPPED, "error": f"not done after {seconds:.0f} s"}
    except EOFError:
        entry |= {"status": FAILED, "error": "the stage's process died"}
    # After its last message the child ends by itself, once it has released the device.
    child.join(min(CLOSING_S, max(0.5, end_s - time.monotonic())))
    if child.is_alive():
        child.kill()
        child.join()
    if entry["status"] != PASSED and child.exitcode:
        entry["exit_code"] = child.exitcode
    return {**entry, "seconds": time.monotonic() - began_s, "budget_s": seconds}


def _child(
    name: str,
    seconds: float,
    options: Options,
    found: dict[str, Found],
    receiver: Connection,
    sender: Connection,
) -> None:
    gc.freeze()  # garbage of the parent may join threads that a fork has not
    receiver.close()
    [stage] = [stage for stage in STAGES if stage.name == name]
    try:
        context = Context.make(
            is_emulated=options.is_emulated,
            seconds=max(seconds / 2, seconds - CLOSING_S),
            pack=options.pack,
            out=options.out,
            found=found,
            save=lambda part: sender.send({"found": part}),
        )
        module = importlib.import_module(f"bench.gpu_run.stages.{stage.module}")
        with on_device(context):
            sender.send({"found": module.run(context), "status": PASSED, "error": None})
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        text = "".join(traceback.format_exception(error))
        sender.send({"status": FAILED, "error": f"{type(error).__name__}: {error}", "trace": text})
