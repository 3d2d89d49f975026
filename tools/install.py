"""Installs this checkout into the environment that runs it, and says what it waits for meanwhile.

    .venv/bin/python -m tools.install demo

`make` runs this first, with nothing installed yet: standard library only. pip is the one of
constraints.txt and takes nothing whose hash is not there, the build's packages included. What pip
and the build say besides goes to `install.log` in the environment, and is shown if they fail.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tools.requirements import (
    CONSTRAINTS,
    build_requirements,
    cpu_torch,
    pinned_pip,
    requirements,
)

ROOT = Path(__file__).resolve().parent.parent
LOG_NAME = "install.log"
LARGE_BYTES = 10e6
"""Downloads from this size on are shown by name."""
INSTALLING_PIP = "installing pip"
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_STEPS = (
    (r"Collecting ", "finding and downloading what it needs"),
    (r"Preparing editable metadata", "compiling the protos and the native kernels"),
    (r"Building wheel for (\S+)", "building {0}"),
)
_RETRY = "WARNING: Retrying "
_DOWNLOAD = re.compile(r"\s*Downloading (\S+?)-(\d[^-]*)-\S+ \(([\d.]+) (kB|MB|GB)\)")
_COLLECTED = re.compile(r"Installing collected packages: (.*)")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.install", description=__doc__)
    parser.add_argument("extra", help="which of the project's extras: demo, dev, ...")
    extra: str = parser.parse_args(arguments).extra
    environment = Path(os.path.relpath(sys.prefix))
    print(f"Installing Loadout into {environment}: this takes some minutes.", flush=True)
    log = environment / LOG_NAME
    progress = Progress(sys.stdout)
    status = 0
    with log.open("w") as file:
        for step, options in installations(extra, environment):
            progress.show(step)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
            said = retry_of if step == INSTALLING_PIP else step_of
            status = run([*pip, "--progress-bar", "off", *options], progress, file, said)
            if status:
                break
    progress.end()
    if status:
        print(*failure(log.read_text().splitlines()), sep="\n", file=sys.stderr)
        print(f"error: pip ended with {status}; {log} has all that it said", file=sys.stderr)
        return 1
    if note := kernels_note():
        print(note)
    return 0


def installations(extra: str, environment: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields what each run of `pip install` is for, and its options. pip comes first: Python's own
    may be too old to check hashes that are in constraints."""
    yield (
        INSTALLING_PIP,
        ["--require-hashes", *_from_file(environment / "pip.txt", pinned_pip(ROOT))],
    )
    needed = [*cpu_torch_if_found(), *build_requirements(ROOT), *requirements(ROOT, [extra])]
    packages = _from_file(environment / "requirements.txt", "\n".join(needed))
    yield "finding and downloading what it needs", [*hashed(ROOT / CONSTRAINTS), *packages]
    yield "building Loadout itself", ["--no-deps", "--no-build-isolation", "--editable", "."]


def _from_file(path: Path, requirements: str) -> list[str]:
    path.write_text(requirements)
    return ["--requirement", str(path)]


def hashed(constraints: Path) -> list[str]:
    """Returns the options with which pip takes nothing but the files of `constraints`."""
    file = str(constraints)
    return ["--require-hashes", "--constraint", file, "--build-constraint", file]


def cpu_torch_if_found() -> list[str]:
    """Returns the requirement of torch's build for CPUs, if pip is configured with a place that has
    it: with hashes to choose by, pip prefers PyPI's build for CUDA, of some gigabytes."""
    build = cpu_torch(ROOT)
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    versions = json.loads(done.stdout)["versions"] if done.returncode == 0 else []
    return [build] if build.removeprefix("torch==") in versions else []


def kernels_note() -> str:
    """Returns what to do if there are no native kernels for this processor's kind, else nothing."""
    from kernels.native import build

    if all(build.library_path(variant).exists() for variant in build.installed_variants()):
        return ""
    if build.find_compiler():
        return (
            f"note: not all native kernels compile: {LOG_NAME} says why; torch may have to compute"
        )
    return (
        "note: there is no C++ compiler for the native kernels, so that torch computes, more "
        "slowly; with g++ installed the next start compiles them"
    )


class Progress:
    """Prints each step with the time since the start; on a terminal that time goes on."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._started_s = time.monotonic()
        self._step = ""

    def show(self, step: str) -> None:
        if step == self._step:
            return
        self.end()
        self._step = step
        self._print(end="" if self._is_terminal else "\n")

    def tick(self) -> None:
        if self._is_terminal and self._step:
            self._out.write("\r")
            self._print(end="")

    def end(self) -> None:
        if self._is_terminal and self._step:
            self.tick()
            self._out.write("\n")
            self._out.flush()
        self._step = ""

    def _print(self, end: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
        self._out.write(f"{minutes:4}:{seconds:02}  {self._step}{end}")
        self._out.flush()


def run(command: list[str], progress: Progress, log: IO[str], step_of: Callable[[str], str]) -> int:
    """Runs pip with its output in `log`; shows what `step_of` says of a line, if anything. Returns
    its exit status."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in ticking(process.stdout, progress):
            log.write(line)
            if step := step_of(line):
                progress.show(step)
    return process.returncode


def ticking(lines: IO[str], progress: Progress) -> Iterator[str]:
    """Yields `lines` as they come, and ticks each second that none does."""
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in lines:
            arrived.put(line)
        arrived.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=1)
        except queue.Empty:
            progress.tick()
            continue
        if not line:
            return
        yield line


def retry_of(line: str) -> str:
    """Returns that pip cannot reach the index, if a line of its says so."""
    is_retry = line.startswith(_RETRY)
    return "waiting for the package index: it does not answer, pip tries again" * is_retry


def step_of(line: str) -> str:
    """Returns what a line of pip's says that it waits for now, if it says so."""
    if found := _DOWNLOAD.match(line):
        name, version, size, unit = found.groups()
        is_large = float(size) * _UNITS[unit] >= LARGE_BYTES
        return f"downloading {name} {version} ({size} {unit})" if is_large else ""
    if found := _COLLECTED.match(line):
        return f"unpacking {len(found.group(1).split(','))} packages"
    for pattern, step in _STEPS:
        if found := re.search(pattern, line):
            return step.format(*found.groups())
    return retry_of(line)


def failure(said: list[str]) -> list[str]:
    """Returns what pip says of its failure: from its first error on, or its last lines."""
    errors = [number for number, line in enumerate(said) if line.lstrip().startswith("ERROR:")]
    return said[errors[0] :] if errors else said[-20:]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
