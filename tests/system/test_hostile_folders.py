"""Commands on an adapter folder that somebody else has made: each thing that hangs, floods or
misleads who trusts it ends every command at once, with one line that names the file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.support import forks
from tests.system.hostile_folders import (
    CONFIG,
    MANY,
    ODD,
    OF_WEIGHTS,
    SECRET,
    THINGS,
    WEIGHTS,
    is_run,
)

BY_CLIENT = ("register", "register --sign-key", "sign", "check", "digest", "strip", "convert")
BY_STORE = ("check", "digest", "strip", "convert")
COMMANDS = [f"loadout {each}" for each in (*BY_CLIENT, "convert --initial")]
COMMANDS += [f"store {each}" for each in (*BY_STORE, "convert --initial")]
READS_TEXTS = {"store check", "store strip"}
"""Of the store's own commands; the client's look at every file before they run one."""

Run = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """All commands on all folders, in a process that ends with what it has started."""
    folder = tmp_path_factory.mktemp("hostile")
    work, printed = folder / "work", folder / "printed"
    work.mkdir()
    process = forks.start("tests.system.hostile_folders", [str(work)], printed)
    try:
        assert process.wait(240) == 0, printed.read_text()[-2000:]
        yield [json.loads(line) for line in printed.read_text().splitlines()]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    ("command", "thing"),
    [each for each in product(COMMANDS, (*THINGS, *OF_WEIGHTS, ODD, MANY)) if is_run(*each)],
)
def test_a_hostile_folder_ends_a_command_with_the_files_name(
    runs: list[Run], command: str, thing: str
) -> None:
    found = [run for run in runs if (run["command"], run["thing"]) == (command, thing)]
    assert found
    for run in found:
        said = run["out"] + run["err"]
        assert SECRET not in said
        assert run["left"] == [], "of what it was to make"
        assert run["code"] in (0, 1), run["code"]
        is_read = run["name"] in (CONFIG, WEIGHTS) or command in READS_TEXTS
        if is_read or command.startswith("loadout") or thing in (ODD, MANY):
            assert_refused(run)


def assert_refused(run: Run) -> None:
    """Requires one line that names the file, and that a terminal shows as it is."""
    if run["command"] == "store check":
        report = json.loads(run["out"])
        said = report["refusal"]["message"]
    else:
        assert (run["code"], run["out"]) == (1, "")
        [said] = run["err"].splitlines()
    assert run["name"] in said
    assert said.isprintable()
