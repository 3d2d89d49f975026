"""What a decode step on a GPU launches, reads and writes, and what that should take: no worse than
it was."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from statistics import median

import pytest

from bench.gpu_model import cost as gpu_cost
from bench.gpu_model import time as gpu_time
from bench.gpu_model.bytes import floor_bytes, traffic
from bench.gpu_model.step import Step, Workload, trace
from bench.results import FOLDER
from tests.support.gpu.features import PLAIN, SHAPE

MOST_MEMORY = 1.05
"""Bytes from and to memory, of the fewest."""
MOST_BYTES = {1: 1.05, 32: 1.05, 128: 1.13}
"""With those that stay in the cache, by rows."""
LEAST_SHARES = {(1, 0): 0.64, (32, 0): 0.61, (128, 0): 0.60, (1, 1): 0.59, (32, 32): 0.54}
LEAST_SHARES |= {(128, 128): 0.48}
"""Of the floor's time in the predicted step, by rows and adapters."""
MOST_CRITICAL, MOST_ROWS_BESIDE = 340, 64
"""Launches that nothing hides, of steps with so many rows at most."""
MOST_ERROR, MOST_MEDIAN_ERROR = 0.10, 0.05
MEASURED = gpu_cost.measured()


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """Steps are forgotten at the end: the collector would look at their million objects."""
    yield
    gpu_cost.step_of.cache_clear()
    gpu_cost.step_in_line.cache_clear()


@pytest.fixture(scope="module", params=gpu_cost.workloads(), ids=str)
def step(request: pytest.FixtureRequest) -> Step:
    return gpu_cost.step_of(request.param)


def test_weights_contexts_and_adapters_are_read_once(step):
    assert sum(traffic(launch, step).constant for launch in step.launches) == floor_bytes(step)


def test_little_else_is_read_and_written(step):
    floor, found = floor_bytes(step), [traffic(launch, step) for launch in step.launches]
    assert sum(each.memory_bytes for each in found) <= MOST_MEMORY * floor
    assert sum(each.all_bytes for each in found) <= MOST_BYTES[step.work.rows] * floor


@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.parametrize("feature", PLAIN)
def test_every_family_is_counted(feature, adapters):
    """Each of its launches, and what lies in memory once; contexts are longer than windows."""
    step = trace(Workload(4, adapters, context=64, rank=4), SHAPE | PLAIN[feature])
    floor, found = floor_bytes(step), [traffic(launch, step) for launch in step.launches]
    assert sum(each.constant for each in found) == floor
    counts, programs = gpu_cost.counts_of(step), gpu_cost.occupancy(step)
    assert counts.nodes + counts.beside == len(step.launches)
    assert counts.all_bytes > floor
    assert gpu_time.device_s(step) > floor / gpu_time.BYTES_PER_S
    ours = {label.split()[0] for label in programs}
    assert ours == {launch.name for launch in step.launches if launch.grid is not None}


def test_critical_path_is_short(step):
    if step.work.rows <= MOST_ROWS_BESIDE:
        assert gpu_cost.counts_of(step).nodes <= MOST_CRITICAL


def test_more_context_is_more_bytes():
    """Of keys and values, and of nothing else that lies in memory before the step."""
    short, long = (gpu_cost.step_of(Workload(2, 0, context)) for context in (512, 4096))
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
        assert written[part] == value, f"{part}: python -m bench.gpu_model.cost"


def test_the_table_is_of_this_code(reckoned):
    assert gpu_cost.markdown(reckoned) in FOLDER.with_name("README.md").read_text()


@pytest.mark.parametrize("part", ["steps", "loop", "in_line"])
def test_measured_steps_are_predicted(reckoned, part):
    """Of all rows, adapters and contexts, with one set of constants."""
    cases = MEASURED["in_line"]["steps"] if part == "in_line" else MEASURED[part]
    assert [row["measured_ms"] for row in reckoned[part]] == [case["step_ms"] for case in cases]
    errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in reckoned[part]]
    for row, error in zip(reckoned[part], errors, strict=True):
        assert error <= MOST_ERROR, row
    assert median(errors) <= MOST_MEDIAN_ERROR


def test_ceilings_are_measured():
    found = {
        "device_read_gb_per_s": gpu_time.BYTES_PER_S / 1e9,
        "product_tflop_per_s": gpu_time.FLOP_PER_S / 1e12,
        "graph_node_us": gpu_time.NODE_S * 1e6,
    }
    ceilings = {name: MEASURED["ceilings"][name] for name in found}
    assert found == pytest.approx(ceilings, rel=0.01)


@pytest.mark.parametrize("case", MEASURED["products"], ids=str)
def test_products_are_predicted(case):
    """Each apart, as cuBLAS streams its weight."""
    features = {"gate_up": (28672, 4096), "down": (4096, 14336)}[case["group"]]
    num_bytes = 2 * math.prod(features)
    found_s = gpu_time.NODE_S + gpu_time.PRODUCT_S + gpu_time.product_s(num_bytes, case["rows"], 2)
    assert found_s == pytest.approx(num_bytes / case["bytes_per_s"], rel=0.1)


@pytest.mark.parametrize("case", MEASURED["lora"], ids=str)
def test_lora_is_predicted(case):
    """Shrink and expand of a group apart, in line. Expand of `down` adds 28 splits, which the model
    leaves out."""
    step = gpu_cost.step_in_line(Workload(case["rows"], case["adapters"]))
    found_us = {
        launch.name: 1e6 * gpu_time.launch_time(launch, step).whole_s
        for launch in step.launches
        if gpu_cost.label(launch, step).endswith(f" {case['group']}")
    }
    assert sum(found_us.values()) == pytest.approx(case["shrink_us"] + case["expand_us"], rel=0.25)


def test_adapters_beside_cost_less_than_in_line():
    """Launches of the critical path take their latency; forks take less."""
    work = Workload(32, 1)
    beside, in_line = gpu_cost.step_of(work), gpu_cost.step_in_line(work)
    assert gpu_time.num_forks(in_line) == 0
    assert gpu_time.num_forks(beside) == 4 * beside.decoder.num_layers
    hidden_s = gpu_time.device_s(in_line) - gpu_time.device_s(beside)
    assert hidden_s > gpu_time.num_forks(beside) * gpu_time.FORK_S


def test_shares_do_not_fall(reckoned):
    shares = {
        (row["rows"], row["adapters"]): row["share"]
        for row in reckoned["steps"]
        if row["context"] == gpu_cost.CONTEXT
    }
    for work, least in LEAST_SHARES.items():
        assert shares[work] >= least, work


def test_launches_have_no_fewer_tasks(reckoned):
    """Of 32 rows those of every kernel fill the SMs, but for a norm's, of which a row has one."""
    for row in reckoned["programs"]:
        for name, launch in row["launches"].items():
            if row["rows"] >= 32 and launch["tasks"]:
                enough = row["rows"] if name.startswith(("add_rms", "rotary")) else gpu_time.NUM_SMS
                assert launch["tasks"] >= enough, (row["rows"], name)
