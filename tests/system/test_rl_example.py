"""The loop of examples/rl, run short against real services."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import pytest

from loadout import Client
from loadout.demo.adapters import MODEL
from loadout.demo.jobs import BASE_MODEL
from loadout.demo.run import MEMORY_FLAGS
from loadout.demo.system import System, SystemSettings
from tests.support import forks

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl" / "grpo.py"
IMPORTS = ("peft",)


@pytest.mark.parametrize(
    ("steps", "learns"), [(3, False), pytest.param(28, True, marks=pytest.mark.long)]
)
def test_the_loop_pushes_each_step_and_learns(tmp_path: Path, steps: int, learns: bool) -> None:
    """What it has learned shows after more steps than `make test` has time for."""
    settings = SystemSettings(MODEL, BASE_MODEL, inference_flags=MEMORY_FLAGS)
    with forks.forked_system(), System(settings, tmp_path / "system") as system:
        environment = {
            "LOADOUT_INFERENCE": system.addresses.inference,
            "LOADOUT_STORE": system.addresses.store,
        }
        out = tmp_path / "out"
        arguments = ["learner", str(MODEL), BASE_MODEL, str(out), str(steps)]
        done = forks.run(str(EXAMPLE), *arguments, environment=environment, imports=IMPORTS)
        assert done.returncode == 0, done.stderr
        with Client(store=system.addresses.store) as client:
            versions = [each.version for each in client.versions("learner") if not each.delete_time]
        assert versions == [steps, steps - 1], "each step pushes one, of which two stay"
    with (out / "rewards.csv").open() as file:
        rewards = [float(row["reward"]) for row in csv.DictReader(file)]
    assert len(rewards) == steps
    assert not learns or mean(rewards[-4:]) > mean(rewards[:4]) + 0.2, rewards
    assert ElementTree.parse(out / "rewards.svg").getroot().tag.endswith("svg")


def test_without_arguments_is_a_usage_line() -> None:
    done = forks.run(str(EXAMPLE), imports=IMPORTS)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("usage: python grpo.py NAME ")
