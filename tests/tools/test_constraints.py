"""constraints.txt: every package that we install, pinned, with hashes, and kept so by one tool."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.machine.installed import closure
from tools.packaging import constraints, install
from tools.packaging.constraints import Pin
from tools.packaging.requirements import CONSTRAINTS, build_requirements, pinned_pip, requirements

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / CONSTRAINTS).read_text()
PINS = constraints.read(TEXT)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
WANTED = [*requirements(ROOT, EXTRAS), *build_requirements(ROOT)]


def test_the_file_is_as_the_tool_writes_it():
    assert constraints.write(PINS) == TEXT
    assert all(pin.hashes for pin in PINS.values())
    two = {name for name, pin in PINS.items() if not pin.specifier.startswith("==")}
    assert two == {constraints.APART}


def test_every_requirement_is_pinned_as_it_allows():
    for line in WANTED:
        wanted = Requirement(line)
        versions = re.findall("=([^,=]+)", PINS[canonicalize_name(wanted.name)].specifier)
        assert any(wanted.specifier.contains(each) for each in versions), line


def test_what_is_installed_is_what_is_pinned():
    """So that no package comes along without a hash."""
    names = closure(["loadout[dev]"]) - {"loadout"}
    assert names >= {"torch", "moto", "mypy"}
    for name in sorted(names):
        version = Version(metadata.version(name)).public
        assert name in PINS, name
        assert version in PINS[name].specifier, (name, version)


class Index:
    """A package index of wheels that it makes, at `url`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        handler = partial(_QuietHandler, directory=str(folder))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, version: str, *needs: str, tag: str = "py3-none-any") -> str:
        """Returns the wheel's hash."""
        page = self.folder / name
        page.mkdir(exist_ok=True)
        wheel = page / f"{name}-{version}-{tag}.whl"
        info = f"{name}-{version}.dist-info"
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        lines += [f"Requires-Dist: {each}" for each in needs]
        with zipfile.ZipFile(wheel, "w") as archive:
            for file, text in {
                "METADATA": "\n".join(lines) + "\n",
                "WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n",
                "RECORD": "",
            }.items():
                archive.writestr(zipfile.ZipInfo(f"{info}/{file}"), text)  # of no date
        self._list(page)
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    def _list(self, page: Path) -> None:
        links = [
            f'<a href="{each.name}#sha256={hashlib.sha256(each.read_bytes()).hexdigest()}">'
            f"{each.name}</a>"
            for each in page.glob("*.whl")
        ]
        (page / "index.html").write_text("<!DOCTYPE html><html><body>" + "".join(links))

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path, monkeypatch) -> Iterator[Index]:
    folder = tmp_path / "index"
    folder.mkdir()
    served = Index(folder)
    monkeypatch.setenv("UV_DEFAULT_INDEX", served.url)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    yield served
    served.stop()


@pytest.fixture
def cpu_index(tmp_path) -> Iterator[Index]:
    folder = tmp_path / "cpu-index"
    folder.mkdir()
    served = Index(folder)
    yield served
    served.stop()


@pytest.fixture
def project(tmp_path, index, cpu_index) -> Path:
    """A project that needs `a` and, for tests, another `triton` than torch does."""
    folder = tmp_path / "project"
    (folder / "deploy/images").mkdir(parents=True)
    (folder / "deploy/images/versions.env").write_text(f"CPU_TORCH_INDEX={cpu_index.url}\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["builder"]\n'
        '[project]\nname = "ours"\nrequires-python = ">=3.11"\n'
        'dependencies = ["a>=1", "torch"]\n'
        '[project.optional-dependencies]\nmore = ["b"]\n'
        'test = ["ours[more]", "triton==3.6.0"]\n'
    )
    (folder / CONSTRAINTS).write_text("")
    for name, version in (("builder", "1"), ("pip", "9"), ("b", "1"), ("triton", "3.6.0")):
        index.add(name, version)
    index.add("triton", "3.7.1")
    index.add("a", "1.0", "c")
    index.add("c", "1.0")
    index.add("torch", "2.0", "triton==3.7.1")
    cpu_index.add("torch", "2.0+cpu")
    return folder


@pytest.mark.processes
def test_hashes_are_those_of_files_that_run_on_linux_with_glibc(index):
    wanted = {
        index.add("a", "1.0", tag=tag)
        for tag in (
            "cp311-cp311-manylinux_2_28_x86_64",
            "cp312-cp312-manylinux2014_aarch64.manylinux_2_17_aarch64",
            "py3-none-manylinux1_x86_64.musllinux_1_1_x86_64",
            "py3-none-linux_x86_64",
            "py3-none-any",
        )
    }
    for tag in ("macosx_14_0_arm64", "win_amd64", "musllinux_1_2_x86_64", "manylinux2014_ppc64le"):
        index.add("a", "1.0", tag=f"cp311-cp311-{tag}")
    assert constraints.resolve(["a"], [])["a"] == Pin("==1.0", frozenset(wanted))


@pytest.mark.processes
def test_pins_stay_until_they_are_upgraded_and_what_nothing_needs_goes(project, index):
    (project / CONSTRAINTS).write_text("a==1.0\nc==1.0\ngone==1.0\n")
    index.add("a", "1.1", "c")
    index.add("c", "1.1")
    pins = constraints.current(project)
    assert {pins[name].specifier for name in ("a", "c")} == {"==1.0"}
    assert set(pins) == {"a", "b", "c", "builder", "pip", "torch", "triton"}
    (project / CONSTRAINTS).write_text(constraints.write(pins))
    assert constraints.current(project) == pins
    upgraded = constraints.current(project, ["c"])
    assert (upgraded["a"].specifier, upgraded["c"].specifier) == ("==1.0", "==1.1")


@pytest.mark.processes
def test_torch_has_the_hashes_of_both_builds_and_triton_two_versions(project, index, cpu_index):
    pins = constraints.current(project)
    plain, cpu = index.add("torch", "2.0", "triton==3.7.1"), cpu_index.add("torch", "2.0+cpu")
    assert pins["torch"] == Pin("==2.0", frozenset({plain, cpu}))
    assert pins["triton"].specifier == ">=3.6.0,<=3.7.1"
    assert len(pins["triton"].hashes) == 2


@pytest.mark.processes
def test_where_the_index_for_cpus_does_not_answer_its_known_hashes_stay(
    project, cpu_index, capsys, monkeypatch, tmp_path
):
    pins = constraints.current(project)
    (project / CONSTRAINTS).write_text(constraints.write(pins))
    cpu_index.stop()
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another"))
    assert constraints.current(project) == pins
    assert "does not answer: the known hashes of torch==2.0+cpu stay" in capsys.readouterr().out
    (project / CONSTRAINTS).write_text("")
    with pytest.raises(constraints.ConstraintsFailed, match=r"no hashes of torch==2\.0\+cpu"):
        constraints.current(project)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("spoilt", "said"), [("", ""), ("a", "DO NOT MATCH THE HASHES"), ("c", "DO NOT MATCH")]
)
def test_pip_takes_no_file_without_its_hash(project, index, tmp_path, spoilt, said):
    """Asked for, or needed by another package: with the options that we install with."""
    pins = constraints.current(project)
    if spoilt:
        pins[spoilt] = Pin(pins[spoilt].specifier, frozenset({"0" * 64}))
    (project / CONSTRAINTS).write_text(constraints.write(pins))
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("a")
    done = pip_dry_run(index, "--requirement", str(wanted), *install.hashed(project / CONSTRAINTS))
    assert (done.returncode == 0) == (not said), done.stderr
    assert said in done.stderr


@pytest.mark.processes
def test_pip_takes_no_package_that_is_not_pinned(project, index, tmp_path):
    pins = constraints.current(project)
    (project / CONSTRAINTS).write_text(
        constraints.write({name: pin for name, pin in pins.items() if name != "c"})
    )
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("a")
    done = pip_dry_run(index, "--requirement", str(wanted), *install.hashed(project / CONSTRAINTS))
    assert done.returncode == 1
    assert "all requirements must have their versions pinned" in done.stderr


def pip_dry_run(index: Index, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--index-url", index.url]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment = {**kept, "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, check=False
    )


def test_pip_itself_has_its_hashes_where_it_is_required():
    """The pip that Python brings along checks these, and not those of constraints."""
    assert constraints.read(pinned_pip(ROOT)) == {"pip": PINS["pip"]}


@pytest.mark.parametrize(("versions", "is_found"), [(["2.13.0", "{}"], True), (["2.13.0"], False)])
def test_torchs_build_for_cpus_is_taken_where_pip_finds_it(monkeypatch, versions, is_found):
    """With hashes to choose by, pip would prefer PyPI's build for CUDA."""
    build = install.cpu_torch(ROOT)
    answer = json.dumps({"versions": [each.format(build.partition("==")[2]) for each in versions]})
    done = subprocess.CompletedProcess([], 0, answer)
    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: done)
    assert install.cpu_torch_if_found() == ([build] if is_found else [])
