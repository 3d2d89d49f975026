"""tests/gpu, then compute-sanitizer on a step that decodes and on a mixed one."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu_run.context import Context, Found
from bench.gpu_run.stages.env import find_sanitizer

JUNIT, SANITIZER_LOG = "junit.xml", "sanitizer.txt"
TOOLS = ("memcheck", "racecheck", "initcheck")
KINDS = ("decode", "mixed")
ERROR_STATUS = 86
"""What compute-sanitizer is told to end with where it finds something."""
SANITIZER_S = 45.0
"""What the tests leave of the stage to it."""
OUTPUT_CHARACTERS = 4000


def run(context: Context) -> Found:
    """Raises AssertionError where a test or a tool has found something."""
    sanitizer_s = SANITIZER_S if context.is_emulated or find_sanitizer() else 0.0
    found: Found = {"tests": run_tests(context, context.deadline.left_s - sanitizer_s)}
    context.save(found)
    found["sanitizer"] = run_sanitizer(context)
    context.save(found)
    tests = found["tests"]
    assert tests["passed"] > 0, f"no test has passed: {tests['output']}"
    assert tests["status"] == 0, f"pytest: {tests}"
    bad = [key for key, each in found["sanitizer"].items() if each["status"]]
    assert not bad, f"compute-sanitizer: {bad}, see {SANITIZER_LOG}"
    return found


def run_tests(context: Context, seconds: float) -> Found:
    """Runs all of tests/gpu; in emulation those marked `smoke`."""
    junit = context.out / JUNIT
    junit.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    command += [f"--junitxml={junit}", "tests/gpu"]
    if context.is_emulated:
        command += ["-m", "smoke"]
    status, output = _run(command, seconds)
    return {
        "status": status,
        **(_counts(junit) if junit.is_file() else {"passed": 0}),
        "output": output[-OUTPUT_CHARACTERS:],
    }


def _counts(junit: Path) -> Found:
    """Returns how many tests passed, and the names of those that did not."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    return {
        "passed": len(cases) - len(bad) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in bad],
    }


def run_sanitizer(context: Context) -> Found:
    """Runs all tools at once, each on both kinds of steps; without compute-sanitizer nothing, in
    emulation the steps alone."""
    program = [sys.executable, "-m", "bench.gpu_run.one_step", *KINDS]
    path = find_sanitizer()
    if context.is_emulated:
        commands = {"no tool": [*program, "--emulate"]}
    else:
        options = ["--error-exitcode", str(ERROR_STATUS)]
        commands = {tool: [path, "--tool", tool, *options, *program] for tool in TOOLS if path}
    seconds = context.deadline.left_s
    with ThreadPoolExecutor(len(TOOLS)) as threads:
        ended = list(threads.map(lambda command: _run(command, seconds), commands.values()))
    found: Found = {}
    log = ""
    for name, (status, output) in zip(commands, ended, strict=True):
        found[name] = {"status": status, "output": output[-300:]}
        log += f"==== {name}: status {status}\n{output}\n"
    (context.out / SANITIZER_LOG).write_text(log)
    return found


def _run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Returns the status, None where it was ended for its time, and all that was printed."""
    # Each tensor in memory of its own, so that what lies beyond one is nobody's.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment if "--tool" in command else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, seconds),
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        return None, output.decode(errors="replace") if isinstance(output, bytes) else output
    return done.returncode, done.stdout
