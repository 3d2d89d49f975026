"""What `make wheel` builds: all that is needed, nothing else, and it runs without a compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import setuptools

from kernels.native.build import installed_variants, runnable_variants
from loadout.demo.system import FREE_PORT
from tests.support.up import Up
from tools.packaging.wheel import BuildFailed, check_libraries

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]
PACKAGES = [
    pattern.rstrip("*")
    for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
]
GENERATED = ("__pycache__", "*_pb2*", "lib")
BUILT_OF = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BESIDES = ("CHANGELOG.md", "constraints.txt")
GLIBC_OF_TORCH = 28
"""The minor version of glibc that torch's wheels need: ours run wherever they do."""


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def in_packages(names: Iterable[str]) -> set[str]:
    """What a wheel has of a checkout's files: all of the packages but notes for developers."""
    return {name for name in names if name.split("/")[0] in PACKAGES and not name.endswith(".md")}


def stubs(sources: Iterable[str]) -> set[str]:
    """The modules that protoc makes of the protos."""
    protos = [name[len("protos/") : -len(".proto")] for name in sources if name.endswith(".proto")]
    return {stem + end for stem in protos for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built of and with, without anything that is generated."""
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns(*GENERATED)
    for name in (*PACKAGES, "protos", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in (*BUILT_OF, *BESIDES):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def sources(checkout: Path) -> set[str]:
    return files_under(checkout)


def leave_behind(checkout: Path) -> None:
    """Writes what an earlier state of the code, its builds and its tests would have left."""
    platform = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for name in (
        "build/lib/loadout/gone.py",
        f"build/lib.{platform}/loadout/gone.py",
        "kernels/native/lib/avx2-0123456789abcdef.so",
        "kernels/native/lib/avx2.lock",
        "loadout/gone/v1/gone_pb2.py",
        "tests/__init__.py",
        "tests/test_gone.py",
        "bench/gone.py",
    ):
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (checkout / "loadout.egg-info").mkdir(exist_ok=True)
    (checkout / "loadout.egg-info" / "SOURCES.txt").write_text("bench/gone.py\n")


def run(*command: str | Path, **further: object) -> str:
    """Runs without this checkout's modules on the path; returns what it prints on stdout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, **{"env": environment, **further}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def load_setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns setup.py as a module; it builds nothing."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    spec = importlib.util.spec_from_file_location("setup_of_loadout", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_source_distribution(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        names = [member.name for member in archive if member.isfile()]
    assert {name.split("/")[0] for name in names} == {f"loadout-{VERSION}"}
    return {name.split("/", 1)[1] for name in names}


def in_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.parametrize(
    ("folder", "is_removed"),
    [("build/lib", True), ("build/lib.linux", True), ("build", False), ("elsewhere", False)],
)
def test_only_an_earlier_build_is_removed(
    folder: str, is_removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--build-lib may name any folder."""
    setup = load_setup(monkeypatch)
    monkeypatch.setattr(setup, "ROOT", tmp_path / "checkout")
    held = tmp_path / "checkout" / folder / "held"
    held.mkdir(parents=True)
    setup.remove_earlier_build(held.parent)
    assert held.exists() is not is_removed


@pytest.mark.slow
def test_source_distribution_has_what_a_wheel_is_built_of(
    checkout: Path, sources: set[str], tmp_path: Path
) -> None:
    leave_behind(checkout)
    shutil.rmtree(checkout / "loadout.egg-info")  # as `make wheel` does
    build = ("-P", "-m", "build", "--no-isolation", "--sdist")
    run(sys.executable, *build, "--outdir", tmp_path, checkout)
    names = in_source_distribution(next(tmp_path.glob("*.tar.gz")))
    assert {name for name in names if not name.startswith("loadout.egg-info/")} == {
        *in_packages(sources),
        *(name for name in sources if name.startswith("protos/")),
        *(*BUILT_OF, *BESIDES, "PKG-INFO", "setup.cfg"),
    }


@pytest.mark.parametrize(
    "libraries", [["avx2-1", "avx512-2"], ["avx2-1", "avx2-2", "avx512-3", "avx512_bf16-4"]]
)
def test_a_wheel_without_exactly_the_variants_is_refused(
    libraries: list[str], tmp_path: Path
) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in libraries:
            archive.writestr(f"kernels/native/lib/{name}.so", b"")
    with pytest.raises(BuildFailed, match="has native kernels for"):
        check_libraries(wheel, ["avx512_bf16", "avx512", "avx2"])


@pytest.fixture(scope="module")
def built(checkout: Path, sources: set[str]) -> Path:
    """The folder that `make wheel` fills, in a checkout that has been used for a while."""
    leave_behind(checkout)
    (checkout / "dist").mkdir()
    (checkout / "dist" / "loadout-0.0.1.tar.gz").write_text("older")
    run(sys.executable, "-m", "tools.packaging.wheel", "--no-isolation", cwd=checkout)
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_wheel_has_all_that_runs_and_nothing_else(
    built: Path, wheel: Path, sources: set[str], checkout: Path, tmp_path: Path
) -> None:
    assert {path.name for path in built.iterdir()} == {wheel.name, f"loadout-{VERSION}.tar.gz"}
    names = in_wheel(wheel)
    libraries = {name for name in names if name.endswith(".so")}
    assert sorted(Path(name).name.split("-")[0] for name in libraries) == sorted(
        installed_variants()
    )
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == in_packages(sources) | stubs(sources) | libraries
    # The same from the tree, as the images' build makes it, and `pip install .`.
    folder = checkout / "kernels" / "native" / "lib"
    shutil.rmtree(folder)
    shutil.rmtree(checkout / "loadout" / "gone")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(checkout, libraries)
    pip = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    run(sys.executable, *pip, checkout)
    from_tree = in_wheel(next(tmp_path.glob("*.whl")))
    assert {name for name in from_tree if ".dist-info/" not in name} == packaged


@pytest.mark.long
def test_wheel_is_for_every_linux_that_torch_is_for(wheel: Path) -> None:
    platform = wheel.stem.removeprefix(f"loadout-{VERSION}-py3-none-")
    if not installed_variants():
        assert platform == "any"
        return
    found = re.fullmatch(r"manylinux_2_(\d+)_x86_64", platform)
    assert found is not None, wheel.name
    assert int(found.group(1)) <= GLIBC_OF_TORCH


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and other packages from this one."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel
    )
    # The folder alone: what makes this checkout importable there is a .pth file, and not read.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "other_packages.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.fixture
def without_compiler(installed: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds the programs of `installed`, and of the system's only
    the one that starts services."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "env").symlink_to(str(shutil.which("env")))
    path = os.pathsep.join(map(str, (installed, programs)))
    environment = {"PATH": path, "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    code = (
        "import kernels, loadout; from kernels.native.build import find_compiler;"
        "print(find_compiler(), kernels.__file__, loadout.__file__)"
    )
    compiler, *files = run(installed / "python", "-c", code, env=environment, cwd=tmp_path).split()
    assert compiler == "None"
    assert all(Path(file).is_relative_to(installed.parent) for file in files)
    return environment


@pytest.mark.long
@pytest.mark.timeout(600)
def test_installed_without_a_compiler_it_serves_with_native_kernels(
    installed: Path, without_compiler: dict[str, str], tmp_path: Path
) -> None:
    loadout = installed / "loadout"
    where = {"env": without_compiler, "cwd": tmp_path}
    assert run(loadout, "--version", **where) == f"loadout {VERSION}\n"
    assert "all services exited with 0" in run(loadout, "demo", "--requests", "45", **where)
    python = str(installed / "python")
    free = f"--listen {FREE_PORT} --metrics-listen {FREE_PORT}"
    flags = ("--store-flags", free, "--serve-flags", free)
    with Up(flags, cwd=tmp_path, python=python, environment=without_compiler) as up:
        of_up = {**without_compiler, **up.environment}
        info = json.loads(run(loadout, "info", "--json", env=of_up, cwd=tmp_path))
    variant = next(iter(runnable_variants()), None)
    assert info["server"]["kernels"] == (f"native {variant}" if variant else "torch")
