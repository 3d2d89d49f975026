"""What a decode step on a GPU launches, reads and writes, and what that should take: no worse than
it was."""

from __future__ import annotations

import json

import pytest

from bench import gpu_cost
from bench.gpu_bytes import floor_bytes, traffic
from bench.gpu_step import Step, Workload, trace
from bench.results import FOLDER
from tests.support.gpu.models import FEATURES, SHAPE

MOST_MEMORY = 1.05
"""Bytes from and to memory, of the fewest."""
MOST_BYTES = {1: 1.05, 32: 1.05, 128: 1.13}
"""With those that stay in the cache, by rows."""
LEAST_SHARES = {(1, 0): 0.72, (32, 0): 0.715, (128, 0): 0.71, (1, 1): 0.65, (32, 32): 0.68}
LEAST_SHARES |= {(128, 128): 0.73}
"""Of the floor's time, by rows and adapters."""


@pytest.fixture(scope="module", params=gpu_cost.workloads(), ids=str)
def step(request: pytest.FixtureRequest) -> Step:
    return trace(request.param)


def test_weights_contexts_and_adapters_are_read_once(step):
    assert sum(traffic(launch, step).constant for launch in step.launches) == floor_bytes(step)


def test_little_else_is_read_and_written(step):
    floor, found = floor_bytes(step), [traffic(launch, step) for launch in step.launches]
    assert sum(each.memory_bytes for each in found) <= MOST_MEMORY * floor
    assert sum(each.all_bytes for each in found) <= MOST_BYTES[step.work.rows] * floor


@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_family_is_counted(feature, adapters):
    """Each of its launches, and what lies in memory once; contexts are longer than windows."""
    step = trace(Workload(4, adapters, context=64, rank=4), SHAPE | FEATURES[feature])
    floor, found = floor_bytes(step), [traffic(launch, step) for launch in step.launches]
    assert sum(each.constant for each in found) == floor
    counts, programs = gpu_cost.counts_of(step), gpu_cost.occupancy(step)
    assert counts.nodes == len(step.launches)
    assert counts.all_bytes > floor
    ours = {label.split()[0] for label in programs}
    assert ours == {launch.name for launch in step.launches if launch.grid is not None}


def test_more_context_is_more_bytes():
    """Of keys and values, and of nothing else that lies in memory before the step."""
    short, long = (trace(Workload(2, 0, context)) for context in (512, 4096))
    description = short.decoder
    more = 2 * (4096 - 512) * description.kv_elements_per_token * 2
    assert floor_bytes(long) - floor_bytes(short) == more
    constant = [sum(traffic(one, each).constant for one in each.launches) for each in (short, long)]
    assert constant[1] - constant[0] == more


@pytest.fixture(scope="module")
def reckoned():
    return gpu_cost.reckon()


def test_what_is_written_is_of_this_code(reckoned):
    """Also every launch's programs. If one of them has changed for the better, write it anew."""
    written = json.loads((FOLDER / "gpu_cost.json").read_text())
    for part, value in reckoned.items():
        assert written[part] == value, f"{part}: python -m bench.gpu_cost"


def test_the_table_is_of_this_code(reckoned):
    assert gpu_cost.markdown(reckoned) in FOLDER.with_name("README.md").read_text()


def test_shares_do_not_fall(reckoned):
    shares = {(row["rows"], row["adapters"]): row["now"]["share"] for row in reckoned["steps"]}
    for work, least in LEAST_SHARES.items():
        assert shares[work] >= least, work


def test_launches_have_no_fewer_tasks(reckoned):
    """Of 32 rows those of every kernel fill the SMs, but for a norm's, of which a row has one."""
    for row in reckoned["programs"]:
        for name, launch in row["launches"].items():
            if row["rows"] >= 32 and launch["tasks"]:
                enough = row["rows"] if name.startswith(("add_rms", "rotary")) else gpu_cost.NUM_SMS
                assert launch["tasks"] >= enough, (row["rows"], name)
