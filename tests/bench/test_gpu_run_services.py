"""The stage that loads both services: its figures, and how it finds the packages that they need."""

from __future__ import annotations

import shutil
import time
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

from adapter_store.checkpoint.open import open_checkpoint
from bench.gpu_run.context import Context, Missing
from bench.gpu_run.goals import summarize
from bench.gpu_run.pack import safetensors as own_safetensors
from bench.gpu_run.pack import wheels
from bench.gpu_run.services import folder
from bench.gpu_run.services.checkpoints import BASE_MODEL, Checkpoints
from bench.gpu_run.services.figures import Message, Round, Streams, row_of, table
from bench.gpu_run.services.plan import Plan, rounds_of
from bench.gpu_run.sizes import REAL, TINY
from bench.gpu_run.stages import services

ON_THE_MACHINE = """
absl-py anyio certifi charset-normalizer click filelock fsspec h11 hf-xet httpcore httpx idna
markdown-it-py markupsafe mdurl mpmath networkx packaging pygments python-dateutil pyyaml requests
setuptools shellingham six sympy tokenizers tqdm urllib3
"""
"""What the image of the machine with the GPU has, and ours require through other packages."""


def closure(roots: list[str]) -> set[str]:
    """Returns these packages and what they require, without extras."""
    found: set[str] = set()
    while roots:
        name = roots.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            parsed = [Requirement(text) for text in requires(name) or []]
            roots += [
                each.name
                for each in parsed
                if each.marker is None
                or each.marker.evaluate({"extra": "", "python_version": "3.12"})
            ]
    return found


def test_every_requirement_of_ours_is_there_or_carried_or_unused():
    direct = {
        each.name.replace("_", "-")
        for each in map(Requirement, requires("loadout") or [])
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    known = {*wheels.NAMES, *wheels.THERE, *(name.replace("_", "-") for name in wheels.UNUSED)}
    assert direct <= known
    needed = direct - {name.replace("_", "-") for name in wheels.UNUSED} - {"torch"}
    assert closure(list(needed)) <= known | set(ON_THE_MACHINE.split())


def make_wheel(wheel: Path, module: str) -> None:
    name, version = wheel.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{module}.py", "VALUE = 7\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.processes
def test_wheels_are_installed_offline_unless_the_version_is_there(tmp_path):
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels" / "not_on_any_index-1.0-py3-none-any.whl", "not_on_any_index")
    here = f"torch-{torch.__version__}-py3-none-any.whl"
    make_wheel(tmp_path / "wheels" / here, "torch")
    target = tmp_path / "target"
    assert wheels.install(tmp_path, target) == ["not_on_any_index-1.0-py3-none-any.whl"]
    assert (target / "not_on_any_index.py").is_file()
    assert not (target / "torch.py").exists()
    (tmp_path / "wheels" / "broken-1.0-py3-none-any.whl").write_bytes(b"no archive")
    with pytest.raises(Missing, match="broken"):
        wheels.install(tmp_path, target)
    assert wheels.install(tmp_path / "elsewhere", target) == []


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "THERE", ("torch", "not-on-any-index"))
    with pytest.raises(Missing, match=r"need not-on-any-index: run `make gpu-pack`"):
        folder.make(tmp_path, tmp_path / "target")
    assert (tmp_path / "target/adapter_store/app.py").is_file()


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """A checkout of one package without its generated modules, next to a pack that has them."""
    folder.pack_stubs(tmp_path / "pack")
    monkeypatch.setattr(folder, "PACKAGES", ("loadout",))
    checkout = tmp_path / "checkout"
    for name in (*folder.PACKAGES, "protos"):
        ignored = shutil.ignore_patterns("__pycache__", "*_pb2*", "results", "assets", "lib")
        shutil.copytree(folder.ROOT / name, checkout / name, ignore=ignored)
    shutil.copy(folder.ROOT / "pyproject.toml", checkout)
    monkeypatch.setattr(folder, "ROOT", checkout)
    monkeypatch.setattr(folder, "PROTOS", checkout / "protos")
    return tmp_path


def test_generated_modules_come_from_the_pack(bare):
    assert folder.make(bare / "pack", bare / "home") == []
    assert len(list((bare / "home").glob(folder.STUB_PATTERN))) == 4


def test_generated_modules_that_are_missing_or_old_are_refused(bare):
    with pytest.raises(Missing, match="are not here: run `make gpu-pack`"):
        folder.make(bare / "nothing", bare / "home")
    [proto, *_] = sorted(folder.PROTOS.rglob("*.proto"))
    proto.write_text(proto.read_text() + "// newer\n")
    with pytest.raises(Missing, match="from other protos"):
        folder.make(bare / "pack", bare / "again")


@pytest.fixture
def made() -> Checkpoints:
    return Checkpoints(TINY, torch.float16, 4, torch.device("cpu"))


def test_checkpoints_are_read_by_the_libraries(made, tmp_path):
    made.write_model(tmp_path / "model")
    tensors: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "model").glob("*.safetensors"):
        tensors |= load_file(path)
    assert sum(tensor.nbytes for name, tensor in tensors.items() if "norm" not in name) == (
        made.model_bytes
    )
    for name in ("a", "b"):
        made.write_adapter(tmp_path / name)
    found = [open_checkpoint(tmp_path / name) for name in ("a", "b")]
    assert found[0].digest != found[1].digest
    size = sum(t.nbytes for t in load_file(tmp_path / "a" / "adapter_model.safetensors").values())
    assert size == made.adapter_bytes
    assert BASE_MODEL in (tmp_path / "a" / "adapter_config.json").read_text()


def test_own_files_are_read_by_the_library(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)}
    own_safetensors.save(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_an_8b_model_has_the_size_of_one(tmp_path):
    made = Checkpoints(REAL.config, torch.bfloat16, REAL.rank, torch.device("cpu"))
    assert made.model_bytes == pytest.approx(16.06e9, rel=0.01)
    assert made.adapter_bytes == pytest.approx(84e6, rel=0.01)


def test_rounds_have_every_mix():
    rounds = rounds_of(REAL.services)
    assert [(each.streams, each.adapters, each.is_cold) for each in rounds] == [
        *[(32, 0, False), (32, 1, False), (32, 16, True), (32, 16, False)],
        *[(128, 0, False), (128, 1, False), (128, 16, True), (128, 16, False)],
        *[(1, 0, False), (1, 1, False)],
        *[(8, 0, False), (8, 8, False)],
    ]
    assert {each.prompt_tokens for each in rounds} == {64, 1000}


def test_a_plan_is_read_as_written(tmp_path):
    plan = Plan(TINY, "float16", 4, "cpu", 2, ("--a", "1"), rounds_of(REAL.services), 7.5)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


def test_the_stage_fails_if_the_device_registers_no_image():
    services.check_registered({"registered": 1.0, "failed": 0.0})
    for results in ({}, {"registered": 0.0, "failed": 1.0}):
        with pytest.raises(AssertionError, match="no shared image was registered"):
            services.check_registered(results)


BASE, ADAPTED = (Round(2, adapters, 5, 3) for adapters in (0, 16))


def test_figures_of_a_round():
    apart = (Message(0.1, 1), Message(0.2, 1), Message(0.4, 1))
    slow = Streams(2.0, (apart, (Message(0.3, 1), Message(2.1, 2))))
    base = row_of(BASE, Streams(1.0, slow.streams), [])
    assert base["tokens_per_s"] == 6.0
    assert base["share_of_base"] is None
    row = row_of(ADAPTED, slow, [base])
    assert row["share_of_base"] == 0.5
    assert row["first_token_ms"] == pytest.approx(200.0)
    assert row["between_tokens_p50_ms"] == pytest.approx(200.0)
    assert row["between_tokens_p99_ms"] == pytest.approx(900.0), "half of the time of two"
    long = row_of(Round(2, 16, 1000, 3), slow, [base])
    assert long["share_of_base"] is None, "prompts of another length"
    text = table({"start_s": 1.5, "rounds": [base, row | {"is_cold": True}]})
    assert text.splitlines()[0] == "start to first token: 1.500 s"
    assert text.splitlines()[-1] == "| 2 | 5 | 16, cold | 3 | 0.50 | 200 | 200.0 (900.0) |"


def test_tokens_of_the_first_message_have_nothing_between_them():
    """A machine may send all of a short stream at once."""
    row = row_of(Round(1, 0, 5, 3), Streams(1.0, ((Message(0.1, 3),),)), [])
    assert row["between_tokens_p50_ms"] == row["between_tokens_p99_ms"] == 0.0


def test_goals_of_services_are_of_resident_adapters():
    rows = [
        {"streams": 32, "adapters": 16, "is_cold": True, "share_of_base": 0.2},
        {"streams": 32, "adapters": 16, "is_cold": False, "share_of_base": 0.93},
    ]
    summary = summarize({"services": {"found": {"rounds": rows}}})
    passed = [goal["passed"] for goal in summary if "over gRPC" in goal["goal"]]
    assert passed == [True, None]


HANGING = """
import json, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print(json.dumps({"child": child.pid}), flush=True)
print("a message", file=sys.stderr, flush=True)
sys.stdin.read()
print(json.dumps({"child": child.pid, "asked": True}), flush=True)
time.sleep(600)
"""


@pytest.mark.processes
def test_a_program_that_hangs_is_asked_to_end_then_killed_with_its_children(tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setattr(services, "PROGRAM", "hanging")
    monkeypatch.setattr(services, "STOP_S", 3.0)
    saved: list[dict] = []
    facts = {"pack": tmp_path, "out": tmp_path, "found": {}, "save": saved.append}
    context = Context.make(is_emulated=True, seconds=6.0, **facts)
    plan = tmp_path / "plan.json"
    found, status, output = services.run_program(context, tmp_path, plan, {"wheels": []})
    assert (status, output) == (-9, "a message\n")
    assert found == {"wheels": [], "child": found["child"], "asked": True} == saved[-1]
    assert len(saved) == 2
    cmdline = Path(f"/proc/{found['child']}/cmdline")
    end_s = time.monotonic() + 10.0
    while is_running(cmdline) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not is_running(cmdline)


def is_running(cmdline: Path) -> bool:
    """A process that has ended has no command line, even if nobody has waited for it."""
    return cmdline.exists() and cmdline.read_bytes() != b""
