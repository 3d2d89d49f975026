"""What runs on a machine with a GPU imports nothing that is not there.

`tests/bench/test_gpu_run.py` runs the tests of `tests/gpu` that are marked `smoke`, emulated;
`make gpu-emulate` runs all of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ALLOWED = """
torch torchgen functorch triton numpy pytest _pytest py pluggy iniconfig packaging pygments
sympy mpmath networkx jinja2 markupsafe filelock fsspec typing_extensions setuptools
tests bench kernels inference_svc servicekit contract
"""
"""torch, triton, numpy and pytest with what they need themselves, and our own packages."""
ELSEWHERE = (
    "bench.gpu_run.pack.__main__",
    "bench.gpu_run.services.program",
    "bench.gpu_run.services.streams",
)
"""Modules of the GPU run that run on another machine, or with the pack's wheels."""
IMPORT_ALONE = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ModuleNotFoundError(f"{name} is not there", name=name)
allowed = set(sys.argv[1].split())
sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def modules_in(folder: str) -> list[str]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


def test_nothing_else_is_imported() -> None:
    """A machine with a GPU may have nothing but torch, triton, numpy and pytest."""
    modules = [*modules_in("tests/gpu"), *modules_in("bench/gpu_run")]
    modules = [name for name in modules if name not in ELSEWHERE]
    command = [sys.executable, "-c", IMPORT_ALONE, ALLOWED, "tests.conftest", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
