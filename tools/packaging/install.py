"""Installs this checkout into the environment that runs this module, and shows the progress.

    .venv/bin/python -m tools.packaging.install demo

`make` runs this before any installation, so it uses only the standard library. pip has the version
in constraints.txt, and installs only files whose hashes are there, also for the build. Other output
of pip and the build goes to `install.log` in the environment, and is shown if they fail.
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

from tools.packaging.requirements import (
    CONSTRAINTS,
    build_requirements,
    cpu_torch,
    pinned_pip,
    requirements,
)

ROOT = Path(__file__).resolve().parents[2]
LOG_NAME = "install.log"
LARGE_BYTES = 10e6
"""Minimum size of downloads that are shown by name."""
INSTALLING_PIP = "installing pip"
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_STEPS = (
    (r"Collecting ", "finding and downloading dependencies"),
    (r"Building editable", "compiling the protos and the native kernels"),
    (r"Building wheel for (\S+)", "building {0}"),
)
_RETRY = "WARNING: Retrying "
_DOWNLOAD = re.compile(r"\s*Downloading (\S+?)-(\d[^-]*)-\S+ \(([\d.]+) (kB|MB|GB)\)")
_COLLECTED = re.compile(r"Installing collected packages: (.*)")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.packaging.install", description=__doc__)
    parser.add_argument("extra", help="an extra of the project: demo, dev, ...")
    extra: str = parser.parse_args(arguments).extra
    environment = Path(os.path.relpath(sys.prefix))
    print(f"Installing Loadout into {environment}. This takes some minutes.", flush=True)
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
        print(f"error: pip ended with {status}; {log} has its whole output", file=sys.stderr)
        return 1
    if note := kernels_note():
        print(note)
    return 0


def installations(extra: str, environment: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the purpose and options of each run of `pip install`. pip comes first, because
    Python's own pip may be too old to check hashes in constraints."""
    yield (
        INSTALLING_PIP,
        ["--require-hashes", *_from_file(environment / "pip.txt", pinned_pip(ROOT))],
    )
    needed = [*cpu_torch_if_found(), *build_requirements(ROOT), *requirements(ROOT, [extra])]
    packages = _from_file(environment / "requirements.txt", "\n".join(needed))
    yield "finding and downloading dependencies", [*hashed(ROOT / CONSTRAINTS), *packages]
    yield "building Loadout itself", ["--no-deps", "--no-build-isolation", "--editable", "."]


def _from_file(path: Path, requirements: str) -> list[str]:
    path.write_text(requirements)
    return ["--requirement", str(path)]


def hashed(constraints: Path) -> list[str]:
    """Returns the options with which pip installs only files of `constraints`."""
    file = str(constraints)
    return ["--require-hashes", "--constraint", file, "--build-constraint", file]


def cpu_torch_if_found() -> list[str]:
    """Returns the requirement of torch's build for CPUs, if one of pip's indexes has it.

    Without this requirement pip prefers PyPI's build for CUDA, of several gigabytes.
    """
    build = cpu_torch(ROOT)
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    versions = json.loads(done.stdout)["versions"] if done.returncode == 0 else []
    return [build] if build.removeprefix("torch==") in versions else []


def kernels_note() -> str:
    """Returns an instruction if this machine's best native kernels are missing, or ""."""
    from kernels.native import build

    if all(build.library_path(variant).exists() for variant in build.runnable_variants()[:1]):
        return ""
    if build.find_compiler():
        return f"note: some native kernels do not compile, see {LOG_NAME}; torch may replace them"
    return (
        "note: there is no C++ compiler for the native kernels, so torch computes, which is "
        "slower; install g++, and the next start compiles them"
    )


class Progress:
    """Prints each step with the time since the start; on a terminal the time is updated."""

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
    """Runs pip with its output in `log`, shows the step that `step_of` finds in a line, if any, and
    returns pip's exit status."""
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
    """Yields `lines` as they arrive, and ticks in each second without one."""
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
    """Returns a message if pip reports in this line that it cannot reach the index, or ""."""
    is_retry = line.startswith(_RETRY)
    return "waiting for the package index, which does not answer; pip tries again" * is_retry


def step_of(line: str) -> str:
    """Returns the step that a line of pip's output starts, or ""."""
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
    """Returns pip's output from its first error on, or its last lines."""
    errors = [number for number, line in enumerate(said) if line.lstrip().startswith("ERROR:")]
    return said[errors[0] :] if errors else said[-20:]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
