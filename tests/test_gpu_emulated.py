"""The tests of `tests/gpu` where there is no GPU: a process whose Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run(*arguments: str) -> str:
    """pytest's output. Fails where pytest does."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


ALLOWED = """
torch torchgen functorch triton numpy pytest _pytest py pluggy iniconfig packaging pygments
sympy mpmath networkx jinja2 markupsafe filelock fsspec typing_extensions setuptools
tests kernels inference_svc servicekit
"""
"""torch, triton, numpy and pytest with what they need themselves, and our own packages."""
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


def test_nothing_else_is_imported() -> None:
    """A machine with a GPU may have nothing but torch, triton, numpy and pytest."""
    modules = [f"tests.gpu.{path.stem}" for path in sorted((ROOT / "tests/gpu").glob("*.py"))]
    command = [sys.executable, "-c", IMPORT_ALONE, ALLOWED, "tests.conftest", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_smoke() -> None:
    """One of each file, of the smallest kind; `make gpu-emulate` runs them all."""
    assert " passed" in run("-m", "smoke")
