"""What `make` shows while it installs: what it waits for, why it failed, and nothing else."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native import build
from tools.packaging import install
from tools.packaging.install import Progress

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Collecting torch>=2.11 (from loadout==0.3.0)\n", "finding and downloading dependencies"),
        (
            "Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.4 MB)\n",
            "downloading torch 2.13.0 (190.4 MB)",
        ),
        ("  Downloading rich-13.9-py3-none-any.whl (1.2 MB)\n", ""),
        (
            "Downloading nvidia_x-13.0-py3-none-any.whl (1.0 GB)\n",
            "downloading nvidia_x 13.0 (1.0 GB)",
        ),
        (
            "  Building editable for loadout (pyproject.toml): started\n",
            "compiling the protos and the native kernels",
        ),
        ("  Building wheel for antlr4 (pyproject.toml): started\n", "building antlr4"),
        ("Installing collected packages: a, b, c\n", "unpacking 3 packages"),
        (
            "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken\n",
            "waiting for the package index, which does not answer; pip tries again",
        ),
        ("WARNING: Location 'file:///x' is ignored\n", ""),
        ("  BuildBackendWarning: Editable installation.\n", ""),
        ("[notice] A new release of pip is available\n", ""),
    ],
)
def test_a_line_of_pips_says_what_it_waits_for(line: str, step: str) -> None:
    assert install.step_of(line) == step


def test_each_step_is_a_line_where_output_is_kept() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for step in ("compiling", "compiling", "unpacking 3 packages"):
        progress.show(step)
        progress.tick()
    progress.end()
    assert out.getvalue() == "   0:00  compiling\n   0:00  unpacking 3 packages\n"


def test_on_a_terminal_the_time_goes_on() -> None:
    out = Terminal()
    progress = Progress(out)
    progress.show("compiling")
    progress.tick()
    progress.show("unpacking 3 packages")
    progress.end()
    lines = [line.rpartition("\r")[2] for line in out.getvalue().split("\n")]
    assert lines == ["   0:00  compiling", "   0:00  unpacking 3 packages", ""]
    assert out.getvalue().count("\r") >= 2


def test_pip_comes_first_and_takes_nothing_without_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own checkout is last, with nothing that it needs."""
    build = install.cpu_torch(ROOT)
    monkeypatch.setattr(install, "cpu_torch_if_found", lambda: [build])
    pip, packages, ours = (options for _, options in install.installations("demo", tmp_path))
    assert "--require-hashes" in pip
    assert (tmp_path / "pip.txt").read_text().startswith("pip==")
    assert {"--require-hashes", "--constraint", "--build-constraint"} <= set(packages)
    wanted = (tmp_path / "requirements.txt").read_text().splitlines()
    # Before what asks for torch of any build, else pip downloads the other one, too.
    assert wanted[0] == build
    assert {"grpcio-tools", "moto[server,s3]", "torch"} <= {re.split("[=>]", x)[0] for x in wanted}
    assert ours == ["--no-deps", "--no-build-isolation", "--editable", "."]


@pytest.mark.processes
def test_what_pip_says_is_kept_and_not_shown(tmp_path: Path) -> None:
    out, log = io.StringIO(), tmp_path / "install.log"
    said = (
        "print('WARNING: noise'); print('Installing collected packages: a, b'); raise SystemExit(3)"
    )
    with log.open("w") as file:
        command = [sys.executable, "-c", said]
        status = install.run(command, Progress(out), file, install.step_of)
    assert status == 3
    assert out.getvalue() == "   0:00  unpacking 2 packages\n"
    assert log.read_text() == "WARNING: noise\nInstalling collected packages: a, b\n"


def test_a_failure_is_shown_from_its_first_error_on() -> None:
    said = ["WARNING: noise", "ERROR: No matching distribution found for torch", "hint: none"]
    assert install.failure(said) == said[1:]
    assert install.failure([str(number) for number in range(50)]) == [
        str(number) for number in range(30, 50)
    ]


@pytest.mark.parametrize(("compiler", "text"), [(None, "install g++"), ("g++", "see install.log")])
def test_without_native_kernels_it_says_what_to_do(
    compiler: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    monkeypatch.setattr(build, "runnable_variants", lambda: ["avx2", "another"])
    assert text in install.kernels_note()
    build.library_path("avx2").touch()
    assert install.kernels_note() == ""


@pytest.mark.processes
def test_make_names_the_python_that_it_needs(tmp_path: Path) -> None:
    target = f"{tmp_path}/venv"
    command = ["make", f"VENV={target}", f"PYTHON={sys.executable}", f"{target}/bin/python"]
    done = subprocess.run(
        [*command, "PYTHON_NEEDED=3.99"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert (
        f"error: {sys.executable} is older than Python 3.99: make PYTHON=python3.99" in done.stderr
    )
    assert not Path(target).exists()
