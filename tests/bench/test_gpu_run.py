"""The GPU run where there is no GPU: every stage, emulated, and what it makes of what it finds."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu_run import run
from bench.gpu_run.cases.quantised_cases import FORMATS
from bench.gpu_run.goals import summarize
from bench.gpu_run.pack import __main__ as pack
from bench.gpu_run.pack.store import RECORDED
from bench.gpu_run.sizes import EMULATED
from bench.gpu_run.stages.pictures import PART_TOKENS
from kernels import tuning

ROOT = Path(__file__).parents[2]

# The fixture runs every stage, minutes on a busy machine.
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gpu_run")


@pytest.fixture(scope="module")
def results(folder) -> dict:
    """Of all stages, without the peers, which would have to be fetched. Another package that is
    called `tests` lies where installed ones do: the stage that runs our tests must not find it."""
    pack.make(folder / "pack", downloads=False, num_requests=9)
    other = folder / "installed" / "tests"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('somebody else's tests')\n")
    done = run_command(folder, PYTHONPATH=str(other.parent))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "out" / "results.json").read_text())


def run_command(folder: Path, *arguments: str, **environment: str) -> SimpleNamespace:
    command = [ROOT / "tools" / "gpu_run.sh", "--emulate", "--out", folder / "out"]
    return subprocess.run(
        [*command, "--pack", folder / "pack", *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def found(results):
    return lambda stage: results["stages"][stage]["found"]


def test_every_stage_passes_within_its_budget(results, folder):
    assert {name: each["status"] for name, each in results["stages"].items()} == {
        stage.name: "passed" for stage in run.STAGES
    }
    for stage in results["stages"].values():
        assert stage["seconds"] < stage["budget_s"]
    assert results["run"]["emulated"]
    assert len([path for path in (folder / "out").iterdir() if path.is_file()]) <= 8


def test_what_is_made_up_is_marked(found, results):
    assert "made up" in results["run"]["times"]
    assert found("env")["times"].startswith("FAKE")


def test_env_has_versions_and_every_ceiling(found):
    assert found("env")["versions"].keys() >= {"python", "torch", "cuda", "triton", "numpy"}
    assert all(value > 0 for value in found("env")["ceilings"].values())


def test_compile_has_all_sizes(found):
    assert found("compile")["variants"].keys() >= {"the demo's model", "8 tokens", "1 rows"}
    assert found("compile")["start_s"] > 0


def test_correct_runs_tests_and_single_steps(found, folder):
    tests = found("correct")["tests"]
    assert tests["passed"] >= 3
    assert tests["failed"] == tests["not_ended"] == []
    assert tests["collected"] == tests["passed"]
    assert (folder / "out" / "failures.log").read_text() == ""
    assert found("correct")["sanitizer"]["no tool"]["output"].strip() == "done: decode, mixed"


def test_parity_is_of_the_whole_engine(found, folder):
    """With an adapter that has more than A and B, the base model, and a plain adapter."""
    thread = found("parity")["thread"]
    assert thread["requests"] == 3
    names = [each["request_id"] for each in json.loads((folder / "pack" / RECORDED).read_text())]
    assert names[:3] == ["0-every-kind", "1-base", "2-upper"]
    assert thread["greedy_share"] == 1.0
    assert thread["different"] == []


def test_tune_tries_constants_of_every_kernel(found, folder):
    ours = found("tune")["ours"]
    tuned = set(tuning.read_table(tuning.path_of(tuning.DEFAULT)))
    # LoRA beside the products or in line is of whole steps: a person compares two runs of `decode`.
    assert ours.keys() == tuned - {"beside"}, "constants that nothing measures"
    for kernel, entry in ours.items():
        assert len(entry["tried"]) == 1, f"{kernel}: {entry}"
    table = json.loads((folder / "out" / "tuned.json").read_text())
    assert table.keys() == found("tune")["best"].keys()
    assert "make gpu-pack" not in found("tune")["missing"]["vllm"]
    assert found("tune")["missing"].keys() == {"vllm", "sglang"}


def test_kernels_are_right_and_name_missing_peers(found):
    cells = found("kernels")["cells"]
    assert {cell["group"] for cell in cells} == {"down", "head"}
    assert {cell["tokens"] for cell in cells} == {1, 2, 8}
    assert all(cell["ours_error"] < 2e-3 for cell in cells)
    assert all(cell["share_of_bound"] > 0 for cell in cells)
    assert found("kernels")["left_out"] == []
    assert "sglang is not in the pack" in found("kernels")["missing"]["sglang"]


def test_kernels_of_families_are_right(found):
    families = found("kernels")["families"]
    assert len(families) > 30
    assert all(cell["error"] < 2e-3 and cell["us"] > 0 for cell in families), families
    products = [cell for cell in families if cell["case"].startswith("products of experts")]
    assert len(products) == 8, "both projections, in tiles of every length"
    assert all(cell["torch_error"] < 2e-3 and cell["torch_ratio"] > 0 for cell in products)


def test_decode_has_rows_adapters_contexts_and_the_loop(found):
    steps = [
        (each["num_rows"], each["num_adapters"], each["has_long"])
        for each in found("decode")["steps"]
    ]
    assert steps == [
        *[(1, 0, False), (1, 1, False), (2, 0, False), (2, 1, False), (2, 2, False)],
        *[(1, 0, True), (2, 0, True)],
    ]
    assert [each["num_adapters"] for each in found("decode")["loop"]] == [0, 1, 2]
    floors = [each["floor_ms"] for each in found("decode")["steps"]]
    assert floors[0] < floors[1], "an adapter's bytes belong to the floor"
    assert len(found("decode")["adapters_cost"]) == 3


def test_prefill_has_attention_beside_torch(found):
    assert len(found("prefill")["prompts"]) == 4
    for each in found("prefill")["attention"]:
        assert each["torch_sdpa"]["difference_to_ours"] < 2e-2
        assert {"missing", "us"} & each["torch_varlen"].keys()


def test_loads_alone_and_beside_steps(found):
    assert found("loads")["alone"]["share_of_bus"] > 0
    assert found("loads")["decode"]["loads"] > 1
    assert found("loads")["decode"]["p99_ratio"] > 0


def test_trace_has_a_file_and_an_account(found, folder):
    for kind in ("decode", "mixed"):
        each = found("trace")[kind]
        assert each["longest"][0]["us"] > 0
        with gzip.open(folder / "out" / each["file"]) as file:
            assert len(json.load(file)["traceEvents"]) >= each["events"] > 0


def test_products_in_few_bits_are_right(found):
    quantised = found("quantised")
    assert quantised["left_out"] == []
    found_cells = {(cell["format"], cell["rows"]) for cell in quantised["cells"]}
    assert found_cells == set(product(FORMATS, EMULATED.quantised_rows))
    for cell in quantised["cells"]:
        assert cell["error"] < 2e-3
        assert cell["share_of_floor"] > 0


def test_pictures_are_timed(found):
    alone, parts, decode = (found("pictures")[key] for key in ("alone", "parts", "decode"))
    assert (alone["patches"], alone["tokens"]) == (16, 4)
    assert alone["first_token_ms"] > 0
    assert [each["tokens"] for each in parts] == list(PART_TOKENS)
    assert all(each["tower_ms"] > 0 for each in parts)
    assert decode["p99_ratio"] > 0
    assert decode["units_per_step"] >= 1


def test_services_have_every_round(found):
    services = found("services")
    rounds = services["rounds"]
    assert [(each["streams"], each["adapters"], each["is_cold"]) for each in rounds] == [
        *[(2, 0, False), (2, 1, False), (2, 2, True), (2, 2, False)],
        *[(3, 0, False), (3, 1, False), (3, 2, True), (3, 2, False)],
        *[(1, 0, False), (1, 1, False)],
        *[(2, 0, False), (2, 2, False)],
    ]
    for each in rounds:
        assert (each["share_of_base"] is None) == (each["adapters"] == 0)
        assert 0 < each["between_tokens_p50_ms"] <= each["between_tokens_p99_ms"]
    assert services["kernels"] == "torch"
    assert 0 < services["register_s"] <= services["compiled_s"]
    assert services["start_s"] > services["cold_first_token_s"] > 0
    assert (services["wheels"], services["left_out"]) == ([], [])


def test_summary_has_every_goal(results):
    assert results["summary"] == summarize(results["stages"])
    measured = [goal for goal in results["summary"] if goal["passed"] is not None]
    assert {goal["goal"] for goal in measured} == {
        "an adapter's load",
        "decode's p99 beside loads",
        "decode's p99 beside pictures",
        "W4A16, groups of 128, 1 rows",
        "stage correct",
        "stage parity",
    }


def test_resume_leaves_out_what_has_passed(results, folder):
    again = run_command(folder, "--resume", "--stages", "0,2-3,trace")
    assert again.returncode == 0
    assert again.stdout.count("passed before") == 4
    kept = json.loads((folder / "out" / "results.json").read_text())["stages"]
    assert kept == results["stages"]
