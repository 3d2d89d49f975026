"""Runs tests/gpu, then compute-sanitizer on a decode step and on a mixed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu_run.compile_pool import MAX_PROCESSES
from bench.gpu_run.context import Context, Found
from bench.gpu_run.shared_tests import EVENTS, FAILURES, FOLDER_VARIABLE, TAKEN
from bench.gpu_run.stages.env import find_sanitizer

SANITIZER_LOG = "sanitizer.txt"
KINDS = ("decode", "mixed")
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": (),
    "racecheck": (),
    "initcheck": ("--dtype", "float32"),
}
"""Each tool's options of the steps. initcheck misses the stores of the tensor memory accelerator,
with which cuBLAS writes products of 16 bits, but not the stores of products in fp32. In fp32 it
reports only reads of memory that really has no values."""
ERROR_STATUS = 86
"""The exit status of compute-sanitizer if it finds an error."""
SANITIZER_S = 45.0
"""Time of the stage reserved for compute-sanitizer."""
END_S = 5.0
"""Time for an interrupted process to end."""
OUTPUT_CHARACTERS = 4000
NUM_SLOWEST = 20


def run(context: Context) -> Found:
    """Runs the stage. Raises AssertionError if a test or a tool finds an error, or if a test has
    not ended.

    A tool that cannot run on this device, or does not end in time, is no error; its status shows
    it.
    """
    sanitizer_s = SANITIZER_S if context.is_emulated or find_sanitizer() else 0.0
    found: Found = {"tests": run_tests(context, context.deadline.left_s - sanitizer_s)}
    context.save(found)
    found["sanitizer"] = run_sanitizer(context)
    context.save(found)
    tests = found["tests"]
    assert tests["passed"] > 0, f"no test has passed: {tests['output']}"
    assert not tests["failed"], f"failed, see {FAILURES}: {tests['failed']}"
    assert not tests["not_ended"], f"not ended: {tests['not_ended']}"
    assert tests["status"] == 0, f"pytest: {tests['output']}"
    bad = [key for key, each in found["sanitizer"].items() if each["status"] == ERROR_STATUS]
    assert not bad, f"compute-sanitizer: {bad}, see {SANITIZER_LOG}"
    return found


def run_tests(context: Context, seconds: float) -> Found:
    """Runs all of tests/gpu in several processes, or in emulation the tests marked `smoke`.

    `out` has every event and every failure at once. See `shared_tests`.
    """
    context.out.mkdir(parents=True, exist_ok=True)
    for name in (EVENTS, FAILURES):
        (context.out / name).write_text("")
    number = 1 if context.is_emulated else max(1, min(MAX_PROCESSES, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    command += ["-p", "bench.gpu_run.shared_tests", "tests/gpu"]
    if context.is_emulated:
        command += ["-m", "smoke"]
    variables = {FOLDER_VARIABLE: str(context.out.absolute())}
    (context.out / TAKEN).unlink(missing_ok=True)
    with ThreadPoolExecutor(number) as threads:
        jobs = [threads.submit(_run, command, seconds, variables) for _ in range(number)]
        ended = [job.result() for job in jobs]
    (context.out / TAKEN).unlink(missing_ok=True)
    bad = [(status, output) for status, output in ended if status != 0]
    status, output = bad[0] if bad else ended[0]
    lines = (context.out / EVENTS).read_text().splitlines()
    return {
        "status": status,
        "processes": number,
        **account([json.loads(line) for line in lines]),
        "output": output[-OUTPUT_CHARACTERS:],
    }


def account(events: Sequence[dict[str, Any]]) -> Found:
    """Returns the numbers of collected, passed and skipped tests; the names of failed ones, of ones
    that have started without an end, and of all that have not ended; and the slowest."""
    names: list[str] = []
    started, ended = set(), set()
    outcomes: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    for each in events:
        if each["event"] == "collected":
            names = each["names"]
        elif each["event"] == "started":
            started.add(each["name"])
        else:
            outcomes[each["name"]].add(each["outcome"])
            seconds[each["name"]] += each["seconds"]
            if each["event"] == "teardown":
                ended.add(each["name"])
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:NUM_SLOWEST]
    return {
        "collected": len(names),
        "passed": sum(outcomes[name] == {"passed"} for name in ended),
        "skipped": sum(outcomes[name] == {"passed", "skipped"} for name in ended),
        "failed": [name for name in names if "failed" in outcomes[name]],
        "interrupted": sorted(started - ended),
        "not_ended": [name for name in names if name not in ended],
        "slowest_s": {name: seconds[name] for name in slowest},
    }


def run_sanitizer(context: Context) -> Found:
    """Runs all tools at once, each on both kinds of steps. Without compute-sanitizer it runs
    nothing, and in emulation only the steps."""
    program = [sys.executable, "-m", "bench.gpu_run.one_step", *KINDS]
    path = find_sanitizer()
    if context.is_emulated:
        commands = {"no tool": [*program, "--emulate", *TOOLS["initcheck"]]}
    elif path is None:
        commands = {}
    else:
        first = [path, "--error-exitcode", str(ERROR_STATUS), "--tool"]
        commands = {tool: [*first, tool, *program, *more] for tool, more in TOOLS.items()}
    seconds = context.deadline.left_s
    # Each tensor gets its own allocation, so that an access beyond its end is an error.
    apart = {} if context.is_emulated else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with ThreadPoolExecutor(len(TOOLS)) as threads:
        ended = list(threads.map(lambda command: _run(command, seconds, apart), commands.values()))
    found: Found = {}
    log = ""
    for name, (status, output) in zip(commands, ended, strict=True):
        found[name] = {"status": status, "output": output[-300:]}
        log += f"==== {name}: status {status}\n{output}\n"
    (context.out / SANITIZER_LOG).write_text(log)
    return found


def _run(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[int | None, str]:
    """Returns the status, None if the process was late, and its output. A late process is
    interrupted, then killed, with all of its children."""
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    for number, patience_s in ((signal.SIGINT, seconds - END_S), (signal.SIGKILL, END_S)):
        try:
            output, _ = process.communicate(timeout=max(1.0, patience_s))
            return (process.returncode if number == signal.SIGINT else None), output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
    output, _ = process.communicate()
    return None, output
