"""The parts of the GPU run: how stages end, what counts as a goal, how constants are chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from safetensors.torch import load_file
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu_run import goals, results_file, run
from bench.gpu_run.cases import lora_cases
from bench.gpu_run.cases.peers import load
from bench.gpu_run.compile_pool import run_jobs
from bench.gpu_run.context import Context, Missing
from bench.gpu_run.model import BenchModel
from bench.gpu_run.pack import safetensors as own_safetensors
from bench.gpu_run.run import Options, Stage, budgets, chosen_stages
from bench.gpu_run.shared_tests import EVENTS, FAILURES, FOLDER_VARIABLE, in_order
from bench.gpu_run.sizes import REAL
from bench.gpu_run.stages.correct import account
from bench.gpu_run.stages.env import empty_kernel, read_kernel
from bench.gpu_run.stages.tune import search, trials, tuned_for
from bench.gpu_run.timing import Deadline

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "loadout/demo/assets/model/model.safetensors"


@pytest.mark.parametrize(
    ("text", "names"),
    [("0", ("env",)), ("8-10", ("prefill", "loads", "trace")), ("trace,0", ("env", "trace"))],
)
def test_stages_by_number_range_and_name(text, names):
    assert chosen_stages(text) == names


@pytest.mark.parametrize("text", ["", "14", "x", "2-", "-3"])
def test_unknown_stages_are_refused(text):
    with pytest.raises(ValueError, match="--stages"):
        chosen_stages(text)


def test_two_calls_take_less_than_ten_minutes_each():
    names = [stage.name for stage in run.STAGES]
    for text in ("0-4", "5-13"):
        assert sum(budgets(chosen_stages(text), None).values()) < 580
    assert budgets(names, 1e6) == budgets(names, None), "none grows"
    shrunk = budgets(names, 800.0)
    assert sum(shrunk.values()) == pytest.approx(800)
    assert shrunk["correct"] == 340
    assert shrunk["tune"] < 110
    with pytest.raises(ValueError, match="need 700"):
        budgets(names, 560.0)


def test_results_are_replaced_in_one_go(tmp_path):
    results_file.write(tmp_path, {"stages": {"env": 1}})
    with pytest.raises(TypeError):
        results_file.write(tmp_path, {"stages": object()})
    assert results_file.read(tmp_path) == {"stages": {"env": 1}}
    assert results_file.read(tmp_path / "elsewhere") == {}


def good(context: Context) -> dict:
    return {"ran": 1 + context.found.get("good", {}).get("ran", 0)}


def broken(context: Context) -> dict:
    context.save({"half": True})
    raise RuntimeError("an illegal memory access")


def dying(context: Context) -> dict:
    os._exit(7)


def seen(context: Context) -> dict:
    """Waits until the file of results has what this stage has saved so far."""
    context.save({"part": 1})
    while not (entry := results_file.read(context.out)["stages"].get("seen", {})).get("found"):
        time.sleep(0.05)
    return {"part": 1, "status_before": entry["status"]}


def hanging(context: Context) -> dict:
    context.save({"half": True})
    while True:
        time.sleep(1.0)


STAGES = (
    Stage("broken", "broken", 60),
    Stage("dying", "dying", 60),
    Stage("hanging", "hanging", 1.0),  # times EMULATED_PATIENCE: a busy machine starts it late
    Stage("good", "good", 60),
    Stage("seen", "seen", 60),
)


@pytest.fixture
def run_fakes(monkeypatch, tmp_path):
    """`run_fakes(*names, resume)` runs these STAGES, or all, the functions above."""
    for function in (good, broken, dying, hanging, seen):
        module = ModuleType(f"bench.gpu_run.stages.{function.__name__}")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(run, "STAGES", STAGES)

    def call(*names: str, resume: bool = False) -> dict:
        names = names or tuple(stage.name for stage in STAGES)
        return run.run_all(Options(tmp_path, tmp_path, names, is_emulated=True, resume=resume))

    return call


@pytest.mark.processes
def test_a_stage_that_ends_badly_does_not_stop_the_next(run_fakes, tmp_path):
    stages = run_fakes()["stages"]
    assert {name: each["status"] for name, each in stages.items()} == {
        "broken": "failed",
        "dying": "failed",
        "hanging": "stopped",
        "good": "passed",
        "seen": "passed",
    }
    assert stages["seen"]["found"]["status_before"] == run.RUNNING, "if the run were killed"
    assert stages["broken"]["error"] == "RuntimeError: an illegal memory access"
    assert "in broken" in stages["broken"]["trace"]
    assert stages["dying"]["exit_code"] == 7
    assert stages["broken"]["found"] == stages["hanging"]["found"] == {"half": True}
    assert json.loads((tmp_path / "results.json").read_text())["stages"] == stages
    again = run_fakes("broken", "good", resume=True)["stages"]
    assert again["good"] == stages["good"], "not run again"
    assert again["broken"]["seconds"] != stages["broken"]["seconds"]


@pytest.mark.processes
def test_a_run_from_the_beginning_forgets_an_earlier_one(run_fakes):
    assert run_fakes("good")["stages"]["good"]["found"] == {"ran": 1}
    assert run_fakes("good")["stages"]["good"]["found"] == {"ran": 1}


def test_without_a_device_and_without_emulation_a_stage_says_so(tmp_path):
    facts = {"seconds": 1.0, "pack": tmp_path, "out": tmp_path, "found": {}, "save": print}
    with pytest.raises(Missing, match="no CUDA device"):
        Context.make(is_emulated=False, **facts)
    context = Context.make(is_emulated=True, **facts)
    with pytest.raises(Missing, match="run the stage env"):
        _ = context.ceilings


@pytest.mark.processes
@pytest.mark.slow
def test_jobs_are_done_in_other_processes_or_left():
    done: list[int] = []
    found = run_jobs(abs, [-1, -2, -3], 120.0, done.append)
    assert (found["jobs"], found["done"], sorted(done)) == (3, 3, [1, 2, 3])
    late = run_jobs(abs, [-1, -2], 0.0, done.append)
    assert (late["jobs"], late["done"], len(done)) == (2, 0, 3)


def real_context(tmp_path: Path) -> Context:
    facts = {"seconds": 1.0, "pack": tmp_path, "out": tmp_path, "found": {}, "save": print}
    return replace(Context.make(is_emulated=True, **facts), sizes=REAL)


def test_kernels_are_measured_for_every_group_rank_and_mix(tmp_path):
    cases = list(lora_cases.cases(real_context(tmp_path)))
    groups = {case.group.name: (case.group.num_in, case.group.widths) for case in cases}
    assert groups == {
        "qkv": (4096, (4096, 1024, 1024)),
        "o": (4096, (4096,)),
        "gate_up": (4096, (14336, 14336)),
        "down": (14336, (4096,)),
        "head": (4096, (128256,)),
    }
    mixes = {(case.num_rows, case.num_adapters) for case in cases if case.row_tokens == 1}
    assert mixes >= {(1, 1), (8, 4), (32, 1), (32, 16), (32, 32), (128, 1), (128, 64), (128, 128)}
    assert {case.rank for case in cases} == {8, 16, 64}
    assert {case.num_tokens for case in cases if case.row_tokens > 1} == {128, 2048}


def test_peers_constants_are_of_the_nearest_case(tmp_path):
    case = next(c for c in lora_cases.cases(real_context(tmp_path)) if c.num_rows == 128)
    tuned = {f"{case.group.name}, {n}": {"configs": n} for n in (1, 32, 2048)}
    assert tuned_for({name: {"configs": {"n": 0}} for name in ("o, 128",)}, case) is None
    found = {key: {"configs": {"at": {"n": each["configs"]}}} for key, each in tuned.items()}
    assert tuned_for(found, case) == {"at": {"n": 32}}


def cell(ratio: float, share: float, **more: float) -> dict:
    return {"case": f"{ratio}", "ratio": ratio, "share_of_bound": share} | more


def kernel_goals(*cells: dict, left_out: tuple[str, ...] = ()) -> list[bool | None]:
    found = {"cells": [*cells], "left_out": [*left_out], "missing": {}}
    summary = goals.summarize({"kernels": {"found": found}})
    return [goal["passed"] for goal in summary if goal["goal"].startswith("LoRA")]


TUNED = {"vllm_tuned_us": 1.0, "sglang_tuned_us": 1.0}


def test_kernel_goals_are_of_every_cell():
    fast, at_bound = cell(1.4, 0.3, **TUNED), cell(1.05, 0.9, **TUNED)
    assert kernel_goals(fast, at_bound) == [True, True]
    assert kernel_goals(fast, cell(1.2, 0.8, **TUNED)) == [False, True]
    assert kernel_goals(fast, cell(0.9, 0.95, **TUNED)) == [True, False]


def test_kernel_goals_need_all_cells_and_tuned_peers():
    assert kernel_goals(cell(1.4, 0.3, **TUNED), left_out=("another",)) == [None, None]
    assert kernel_goals(cell(1.4, 0.3)) == [None, None]
    assert kernel_goals(cell(1.4, 0.3, vllm_tuned_us=1.0)) == [None, None]
    assert kernel_goals(cell(0.9, 0.3)) == [False, False], "slower than an untuned one"


def test_decode_and_load_goals():
    loop = [
        {"num_rows": 1, "num_adapters": 0, "share_of_floor": 0.76},
        {"num_rows": 32, "num_adapters": 32, "share_of_floor": 0.74},
    ]
    loads = {"alone": {"share_of_bus": 0.81}, "decode": {"p99_ratio": 1.2}}
    stages = {"decode": {"loop": loop}, "loads": loads, "pictures": {"decode": {"p99_ratio": 1.05}}}
    summary = goals.summarize({name: {"found": found} for name, found in stages.items()})
    passed = {goal["goal"]: goal["passed"] for goal in summary}
    assert passed["decode, 1 rows, 0 adapters"] is True
    assert passed["decode, 32 rows, 32 adapters"] is False
    assert passed["an adapter's load"] is True
    assert passed["decode's p99 beside loads"] is False
    assert passed["decode's p99 beside pictures"] is True
    assert "MISS         decode, 32 rows, 32 adapters" in goals.table(summary)


DEFAULT, SPACE = {"block": 64, "warps": 4}, {"block": (32, 128), "warps": (2, 8)}


def test_trials_change_one_constant_each():
    assert list(trials(DEFAULT, SPACE)) == [
        DEFAULT,
        *({"block": block, "warps": 4} for block in (32, 128)),
        *({"block": 64, "warps": warps} for warps in (2, 8)),
    ]


def test_search_takes_what_is_better_together():
    def measure(constants):
        us = 100.0 * {32: 1.2, 64: 1.0, 128: 0.8}[constants["block"]]
        return [us * {2: 1.1, 4: 1.0, 8: 0.9}[constants["warps"]], 50.0]

    best, entry = search(DEFAULT, SPACE, measure, Deadline(60), 99)
    assert best == {"block": 128, "warps": 8}
    assert entry["share_of_default"] == pytest.approx(0.72**0.5)
    assert len(entry["tried"]) == 5


def test_search_keeps_the_default_against_noise_and_wrong_numbers():
    calls = []

    def measure(constants):
        calls.append(constants)
        if constants["block"] == 128:
            return None  # other numbers
        # The first measurement of every other looks good, the second does not.
        return [80.0 if constants != DEFAULT and calls.count(constants) == 1 else 100.0]

    best, entry = search(DEFAULT, SPACE, measure, Deadline(60), 99)
    assert best == DEFAULT
    assert entry["share_of_default"] == 1.0
    assert {"block": 128} not in [each["changed"] for each in entry["tried"]]


def test_search_stops_at_its_deadline():
    best, entry = search(DEFAULT, SPACE, lambda constants: [1.0], Deadline(0), 99)
    assert (best, entry["tried"], entry["was_cut_short"]) == (DEFAULT, [], True)


def test_own_reader_of_the_model_reads_as_the_library():
    wanted = load_file(MODEL)
    with own_safetensors.safe_open(MODEL, "pt") as file:
        assert set(file.offset_keys()) == wanted.keys()
        for name, tensor in wanted.items():
            assert tuple(file.get_slice(name).get_shape()) == tuple(tensor.shape)
            assert torch.equal(file.get_tensor(name), tensor)
    assert not own_safetensors.install_if_missing(), "the library is installed here"


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(MODEL.read_bytes()[:100])
    with pytest.raises(own_safetensors.SafetensorError), own_safetensors.safe_open(path, "pt"):
        pass


def test_a_missing_peer_says_why(tmp_path):
    with pytest.raises(Missing, match="make gpu-pack"):
        load(tmp_path, "vllm")
    (tmp_path / "pack.json").write_text(json.dumps({"missing": {"vllm": "no such wheel"}}))
    with pytest.raises(Missing, match="vllm is not in the pack: no such wheel"):
        load(tmp_path, "vllm")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kernel", "arguments", "instruction"),
    [
        (empty_kernel, {"out": "*i32"}, "st.global"),
        (read_kernel, {"source": "*i32", "out": "*i32", "num_elements": "i32"}, "ld.global"),
    ],
)
def test_the_kernels_of_env_compile_for_a_device(kernel, arguments, instruction):
    """Triton's interpreter, in which the stages are tried out, does not read annotations."""
    source = ASTSource(fn=kernel, signature=arguments, constexprs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert instruction in compiled.asm["ptx"]


def test_a_floor_is_of_bytes_or_of_products(tmp_path):
    slow, fast = 1.0, 1e9

    def floor_us(read: float, product: float, rows: int, adapters: int) -> float:
        ceilings = {"device_read_gb_per_s": read, "product_tflop_per_s": product}
        facts = {"seconds": 1.0, "pack": tmp_path, "out": tmp_path, "save": print}
        found = {"env": {"ceilings": ceilings}}
        context = Context.make(is_emulated=True, found=found, **facts)
        model = BenchModel(context, num_adapters=2, max_rows=2, max_context=8)
        return model.floor_us([5] * rows, adapters)

    one, two = (floor_us(slow, fast, rows, 0) for rows in (1, 2))
    assert one < two < 1.1 * one, "the weights are read once"
    for adapters in (0, 1):
        one, two = (floor_us(fast, slow, rows, adapters) for rows in (1, 2))
        assert two == pytest.approx(2 * one), "every row is computed"
    assert one > floor_us(fast, slow, 1, 0), "with its adapter"


SHARED = """
import pytest, time
@pytest.mark.parametrize("n", range(6))
def test_a(n):
    time.sleep(0.3)
    assert n != 3, "an odd number"
def test_step_of_all():
    pass
"""


def test_the_longest_tests_begin_and_the_same_features_are_apart():
    names = ["a.py::short", "test_step.py::t[x-1]", "test_step.py::t[x-2]", "test_step.py::t[y-1]"]
    names.append("test_step.py::test_features_with_adapters_of_every_kind[x]")
    assert [names[index] for index in in_order(names)] == [
        "test_step.py::test_features_with_adapters_of_every_kind[x]",
        "test_step.py::t[x-1]",
        "test_step.py::t[y-1]",
        "test_step.py::t[x-2]",
        "a.py::short",
    ]


@pytest.mark.processes
def test_processes_share_tests_and_write_failures_at_once(tmp_path):
    (tmp_path / "test_shared.py").write_text(SHARED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.gpu_run.shared_tests"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    variables = os.environ | {FOLDER_VARIABLE: str(tmp_path)}
    running = [
        subprocess.Popen(command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in running]
    assert sorted(process.returncode for process in running) == [0, 1], outputs
    events = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    ended = [each["name"] for each in events if each["event"] == "teardown"]
    assert len(ended) == len(set(ended)) == 7
    found = account(events)
    assert (found["collected"], found["passed"], found["not_ended"]) == (7, 6, [])
    assert [name.rpartition("::")[2] for name in found["failed"]] == ["test_a[3]"]
    assert "an odd number" in (tmp_path / FAILURES).read_text()


def test_tests_that_never_ran_are_named():
    def event(kind: str, name: str, outcome: str = "passed") -> dict:
        return {"event": kind, "name": name, "outcome": outcome, "seconds": 1.0}

    events = [{"event": "collected", "names": ["a", "b", "c", "d"]}]
    events += [event("started", name) for name in "abc"]
    events += [event(kind, "a") for kind in ("setup", "call", "teardown")]
    events += [event("setup", "b", "skipped"), event("teardown", "b"), event("setup", "c")]
    found = account(events)
    assert (found["passed"], found["skipped"], found["failed"]) == (1, 1, [])
    assert (found["interrupted"], found["not_ended"]) == (["c"], ["c", "d"])
    assert found["slowest_s"]["a"] == 3.0
