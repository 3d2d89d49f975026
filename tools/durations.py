"""Shows the durations of a run of the tests, and compares folders with a committed table.

    python -m tools.durations [REPORT] [--top 25] [--update]
    python -m tools.durations --check

REPORT is JUnit's file of a run (`make test` writes build/junit.xml), with the properties of
`tests.support.durations`: seconds of each phase and of each fixture, and processor time. --update
writes the folders' seconds into tests/durations.toml. --check fails if a folder takes over 10 %
more than its line in this table, after a correction for the machine's speed. It also fails if a
commit raises a folder's line by over 10 % and its message does not name the folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

from tests.support.durations import FIXTURE, FORKS, PROCESSOR
from tools.history import ROOT, git, message_of

REPORT = ROOT / "build" / "junit.xml"
TABLE = ROOT / "tests" / "durations.toml"
PHASES = ("setup", "call", "teardown")
MAX_GROWTH = 1.1
MIN_GROWTH_S = 10.0
"""Minimum growth, because a folder of few seconds grows by chance."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a run. `seconds` is its total, `phases` and `fixtures` are parts above 5 ms.
    `processor_s` is the processor's time, also of the processes that the test started."""

    file: str
    name: str
    seconds: float
    phases: Mapping[str, float]
    fixtures: Mapping[str, float]
    processor_s: float

    @property
    def folder(self) -> str:
        """The first two folders under tests."""
        return "/".join(self.file.split("/")[:-1][:3])


def read(report: Path) -> list[Case]:
    """Returns the tests of a JUnit file. Raises FileNotFoundError, ElementTree.ParseError."""
    tree = ElementTree.parse(report)
    forks: dict[tuple[str, str], float] = defaultdict(float)
    for each in tree.iterfind("testsuite/properties/property"):
        if each.get("name", "").startswith(FORKS):
            forks[_address(each.get("name", ""))] += float(each.get("value", 0))
    return [_case(each, forks) for each in tree.iter("testcase")]


def _address(name: str) -> tuple[str, str]:
    """Returns the file and the test of a property of forks."""
    path, bracket, parameters = name.removeprefix(FORKS).partition("[")
    file, *_, test = path.split("::")
    return file, test + bracket + parameters


def _case(element: ElementTree.Element, forks: Mapping[tuple[str, str], float]) -> Case:
    file = element.get("classname", "").replace(".", "/") + ".py"
    processor_s = forks.get((file, element.get("name", "")), 0.0)
    phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    fixtures: dict[str, float] = defaultdict(float)
    for each in element.iter("property"):
        name, value = each.get("name", ""), float(each.get("value", 0))
        if name in phases:
            phases[name] += value
        elif name == PROCESSOR:
            processor_s += value
        elif name.startswith(FIXTURE):
            fixtures[name.removeprefix(FIXTURE)] += value
    seconds = float(element.get("time", 0))
    return Case(file, element.get("name", ""), seconds, phases, dict(fixtures), processor_s)


def by_folder(cases: Iterable[Case]) -> dict[str, float]:
    """Returns each folder's seconds."""
    found: dict[str, float] = defaultdict(float)
    for case in cases:
        found[case.folder] += case.seconds
    return dict(found)


def grown(now: Mapping[str, float], before: Mapping[str, float], speed: float = 1.0) -> list[str]:
    """Returns a line for each folder that grew by over 10 % and ten seconds. `speed` is the factor
    by which this machine is slower in general."""
    found = []
    for folder, seconds in now.items():
        allowed = before.get(folder, 0.0) * speed
        if seconds > allowed * MAX_GROWTH and seconds > allowed + MIN_GROWTH_S * speed:
            found.append(f"{folder}: {seconds:.0f} s, of {allowed:.0f}")
    return found


def speed_of(now: Mapping[str, float], before: Mapping[str, float]) -> float:
    """Returns the median factor by which larger folders took longer than in the table."""
    both = [now[folder] / before[folder] for folder in now if before.get(folder, 0) > MIN_GROWTH_S]
    return median(both) if both else 1.0


def load_table(text: str) -> dict[str, float]:
    """Returns the folders' seconds of a table. Raises tomllib.TOMLDecodeError."""
    return dict(tomllib.loads(text).get("folders", {}))


def write_table(seconds: Mapping[str, float], table: Path = TABLE) -> None:
    lines = [
        "# Seconds of each folder's tests, all workers together: `make durations` after `make",
        "# test`. A commit that raises a line by over 10 % names the folder.",
        "[folders]",
        *(f'"{folder}" = {seconds[folder]:.0f}' for folder in sorted(seconds)),
    ]
    table.write_text("\n".join(lines) + "\n")


def unnamed_growth() -> Iterator[str]:
    """Yields the lines of the table that a commit raised without the folder's name."""
    name = str(TABLE.relative_to(ROOT))
    for commit in git("rev-list", "--no-merges", "HEAD", "--", name).split():
        before, after = (_table_at(each, name) for each in (f"{commit}^", commit))
        for line in grown(after, before) if before else ():
            if line.partition(":")[0] not in message_of(commit):
                yield f"{commit[:12]} does not name a folder that grows: {line}"


def _table_at(commit: str, name: str) -> dict[str, float]:
    try:
        return load_table(git("show", f"{commit}:{name}"))
    except subprocess.CalledProcessError:  # the first commit of the table, or of this history
        return {}


def check() -> list[str]:
    """Returns a line for each folder that grew, in the last run or in the committed table."""
    wrong = []
    if REPORT.exists() and TABLE.exists():
        now, before = by_folder(read(REPORT)), load_table(TABLE.read_text())
        if now.keys() >= before.keys():  # a run of all tests
            lines = grown(now, before, speed_of(now, before))
            wrong += [f"tests take longer than in tests/durations.toml: {line}" for line in lines]
    return [*wrong, *unnamed_growth()]


def show(cases: list[Case], top: int) -> None:
    """Prints seconds by folder, by file and by fixture, the longest first."""
    total = sum(case.seconds for case in cases)
    processor_s = sum(case.processor_s for case in cases)
    print(f"{len(cases)} tests, {total:.0f} s in all workers, {processor_s:.0f} s of processors\n")
    for title, key in (("folder", lambda each: each.folder), ("file", lambda each: each.file)):
        rows: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
        for case in cases:
            row = rows[key(case)]
            for index, phase in enumerate(PHASES):
                row[index + 1] += case.phases[phase]
            row[0] += case.seconds
            row[4] += case.processor_s
        _print(title, ("seconds", *PHASES, PROCESSOR), rows, top)
    fixtures: dict[str, list[float]] = defaultdict(lambda: [0.0] * 2)
    for case in cases:
        for name, seconds in case.fixtures.items():
            fixtures[name][0] += seconds
            fixtures[name][1] += 1
    _print("fixture", ("seconds", "times"), fixtures, top)


def _print(title: str, columns: tuple[str, ...], rows: Mapping[str, list[float]], top: int) -> None:
    print(f"{title:60}" + "".join(f"{each:>10}" for each in columns))
    for name, row in sorted(rows.items(), key=lambda each: -each[1][0])[:top]:
        print(f"{name:60}" + "".join(f"{each:10.1f}" for each in row))
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", nargs="?", type=Path, default=REPORT)
    parser.add_argument("--top", type=int, default=25, help="rows of each table")
    parser.add_argument("--update", action="store_true", help="write tests/durations.toml")
    parser.add_argument("--check", action="store_true", help="fail if a folder has grown")
    args = parser.parse_args()
    if args.check:
        wrong = check()
        print("\n".join(wrong), end="\n" if wrong else "")
        return bool(wrong)
    cases = read(args.report)
    show(cases, args.top)
    if args.update:
        write_table(by_folder(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
