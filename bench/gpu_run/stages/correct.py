"""Runs tests/gpu, then compute-sanitizer on a decode step and on a mixed one."""

from __future__ import annotations

import os
import signal
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
"""The exit status of compute-sanitizer if it finds an error."""
SANITIZER_S = 35.0
"""Time of the stage reserved for compute-sanitizer."""
NUM_PROCESSES = 8
"""Processes for the tests, which spend most of their time on compilation."""
END_S = 5.0
"""Time for an interrupted process to write its results."""
OUTPUT_CHARACTERS = 4000


def run(context: Context) -> Found:
    """Runs the stage. Raises AssertionError if a test or a tool finds an error.

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
    assert tests["status"] == 0, f"pytest: {tests}"
    bad = [key for key, each in found["sanitizer"].items() if each["status"] == ERROR_STATUS]
    assert not bad, f"compute-sanitizer: {bad}, see {SANITIZER_LOG}"
    return found


def run_tests(context: Context, seconds: float) -> Found:
    """Runs all of tests/gpu in several processes, or in emulation the tests marked `smoke`."""
    context.out.mkdir(parents=True, exist_ok=True)
    number = 1 if context.is_emulated else NUM_PROCESSES
    files = [context.out / f"{index}.{JUNIT}" for index in range(number)]
    with ThreadPoolExecutor(number) as threads:
        jobs = [
            threads.submit(_run_share, context, file, f"{index}/{number}", seconds)
            for index, file in enumerate(files)
        ]
        ended = [job.result() for job in jobs]
    bad = [(status, output) for status, output in ended if status]
    status, output = bad[0] if bad else ended[0]
    return {
        "status": None if any(each is None for each, _ in ended) else status,
        **_counts(_merge(files, context.out / JUNIT)),
        "output": output[-OUTPUT_CHARACTERS:],
    }


def _run_share(context: Context, junit: Path, share: str, seconds: float) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    command += [f"--junitxml={junit}", "tests/gpu"]
    if context.is_emulated:
        command += ["-m", "smoke"]
    return _run(command, seconds, {"GPU_TESTS_SHARE": share})


def _merge(files: list[Path], junit: Path) -> Path:
    """Merges the suites of all files into one file."""
    root = ElementTree.Element("testsuites")
    for file in files:
        if file.is_file():
            root.extend(ElementTree.parse(file).getroot().iter("testsuite"))
            file.unlink()
    ElementTree.ElementTree(root).write(junit, encoding="utf-8", xml_declaration=True)
    return junit


def _counts(junit: Path) -> Found:
    """Returns the numbers of passed and skipped tests, and the names of failed ones."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    return {
        "passed": len(cases) - len(bad) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in bad],
    }


def run_sanitizer(context: Context) -> Found:
    """Runs all tools at once, each on both kinds of steps. Without compute-sanitizer it runs
    nothing, and in emulation only the steps."""
    program = [sys.executable, "-m", "bench.gpu_run.one_step", *KINDS]
    path = find_sanitizer()
    if context.is_emulated:
        commands = {"no tool": [*program, "--emulate"]}
    else:
        options = ["--error-exitcode", str(ERROR_STATUS)]
        commands = {tool: [path, "--tool", tool, *options, *program] for tool in TOOLS if path}
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
