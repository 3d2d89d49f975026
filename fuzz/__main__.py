"""`python -m fuzz` fuzzes all targets. Its exit code is 1 if it finds a fault."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzz.campaign import Outcome, line_of, report, run
from fuzz.targets import SHARES, TARGETS

DEFAULT_EXECUTIONS = 1_050_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--executions", type=int, default=DEFAULT_EXECUTIONS, help="of all targets")
    parser.add_argument("--target", choices=TARGETS, action="append", help="fuzz only this target")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--artifacts", type=Path, default=Path(".loadout/fuzz"))
    asked = parser.parse_args()
    targets = asked.target or list(TARGETS)
    shares = sum(SHARES[target] for target in targets)

    def work(target: str) -> Outcome:
        executions = asked.executions * SHARES[target] // shares
        outcome = run(target, executions, asked.artifacts, asked.seed)
        print(line_of(outcome), file=sys.stderr, flush=True)
        return outcome

    with ThreadPoolExecutor(asked.jobs) as jobs:
        outcomes = list(jobs.map(work, targets))
    print("\n".join(report(outcomes)))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
