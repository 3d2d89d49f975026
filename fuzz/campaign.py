"""Runs a campaign: fuzzes each target in its own process, watches it, and reports the outcome."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
DICTIONARY = Path(__file__).with_name("dictionary.txt")
TIMEOUT_SECONDS = 20
RSS_LIMIT_MIB = 1024
MAX_GROWTH_MIB = 64
MIN_TO_ACCEPT = 1000
"""From this many executions on, some must be accepted, because most are changed seeds."""
MAX_INPUT_BYTES = 4096
MAX_INPUT_BYTES_OF = {"image": 8192, "tokenizer": 8192, "gguf": 8192, "packed": 8192}
"""Limits of targets with larger seeds."""

_RESIDENT = re.compile(r"^resident: (\d+) KiB", re.MULTILINE)
_ACCEPTED = re.compile(r"^resident: .*, accepted: (\d+)", re.MULTILINE)
_EXECUTIONS = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_COVERAGE = re.compile(r"cov: (\d+)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one target. `fault` is the end of the fuzzer's log, or empty without a fault.

    The sizes are resident memory: after the first hundred executions, at the end, and the peak.
    `accepted` counts the executions in which a reader accepted its input, out of nearly all: a
    target that refuses everything tests nothing after its first check. `executions` is smaller than
    `asked` if a fuzzer ended early or did not run.
    """

    target: str
    executions: int
    seconds: float
    coverage: int
    start_mib: float
    end_mib: float
    peak_mib: float
    fault: str
    asked: int
    accepted: int = 0

    @property
    def is_good(self) -> bool:
        has_run = self.executions >= self.asked
        accepts = self.accepted > 0 or self.asked < MIN_TO_ACCEPT
        grown_mib = self.peak_mib - self.start_mib
        return has_run and accepts and not self.fault and grown_mib <= MAX_GROWTH_MIB


def run(target: str, executions: int, artifacts: Path, seed: int) -> Outcome:
    """Fuzzes one target and leaves the inputs that failed in `artifacts`."""
    artifacts.mkdir(parents=True, exist_ok=True)
    seeds = CORPUS / target
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as found:
        command = [
            *(sys.executable, "-m", "fuzz.worker", target),
            f"-runs={executions}",
            f"-seed={seed}",
            f"-timeout={TIMEOUT_SECONDS}",
            f"-rss_limit_mb={RSS_LIMIT_MIB}",
            f"-max_len={MAX_INPUT_BYTES_OF.get(target, MAX_INPUT_BYTES)}",
            f"-dict={DICTIONARY}",
            f"-artifact_prefix={artifacts}/{target}-",
            "-print_final_stats=1",
            found,
            str(seeds),
        ]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    return read_outcome(target, executions, done.stdout, done.returncode, time.monotonic() - start)


def read_outcome(target: str, asked: int, log: str, exit_code: int, seconds: float) -> Outcome:
    """Reads an outcome from libFuzzer's log."""
    sizes_mib = [int(size) / 1024 for size in _RESIDENT.findall(log)] or [0.0]
    executed = _EXECUTIONS.search(log)
    fault = "" if exit_code == 0 else "\n".join(log.splitlines()[-25:])
    return Outcome(
        target=target,
        executions=int(executed[1]) if executed else 0,
        seconds=seconds,
        coverage=max(map(int, _COVERAGE.findall(log)), default=0),
        start_mib=sizes_mib[0],
        end_mib=sizes_mib[-1],
        peak_mib=max(sizes_mib),
        fault=fault,
        asked=asked,
        accepted=max(map(int, _ACCEPTED.findall(log)), default=0),
    )


def line_of(outcome: Outcome) -> str:
    """Returns the row of one target in the report."""
    result = "good" if outcome.is_good else "FAULT"
    return (
        f"{outcome.target:17} {outcome.executions:11,} "
        f"{outcome.accepted / max(1, outcome.executions):9.1%} {outcome.seconds:8.0f} "
        f"{outcome.coverage:9,} {outcome.start_mib:11.1f} {outcome.end_mib:6.1f} "
        f"{outcome.peak_mib:6.1f}  {result}"
    )


def report(outcomes: list[Outcome]) -> Iterator[str]:
    """Yields the lines of the report."""
    yield (
        f"{'target':17} {'executions':>11} {'accepted':>9} {'seconds':>8} {'coverage':>9} "
        f"{'MiB: start':>11} {'end':>6} {'most':>6}  result"
    )
    yield from map(line_of, outcomes)
    total = sum(outcome.executions for outcome in outcomes)
    faults = sum(not outcome.is_good for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    yield f"{'all':17} {total:11,} {'':9} {seconds:8.0f} {'':36} {faults} faults"
    for outcome in outcomes:
        if outcome.fault:
            yield f"\n{outcome.target}:\n{outcome.fault}"
