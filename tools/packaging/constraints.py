"""Writes constraints.txt: one version of every package that any of our installations uses, with the
SHA-256 of its files for Linux.

    python -m tools.packaging.constraints [--upgrade NAME ...]

Existing versions stay, unless pyproject.toml or another package excludes them. --upgrade gives the
named packages their newest versions. Packages that nothing needs are removed. uv queries the
indexes, and has its own settings for their addresses (UV_DEFAULT_INDEX).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tools.packaging.requirements import CONSTRAINTS, PYPROJECT, build_requirements, requirements

ROOT = Path(__file__).parents[2]
VERSIONS = "deploy/images/versions.env"
HEADER = """\
# The version of every package that we install, with the hashes of its files for Linux on x86-64 and
# ARM64, including torch's builds for CPUs. With this version of pip, no other file is installed:
# pip install --require-hashes --constraint constraints.txt. Written by `make constraints`.
"""
APART = "triton"
"""Tests use the version in pyproject.toml; torch for CUDA requires another one."""
_LINUX = re.compile(r"any|(manylinux\w*|linux)_(x86_64|aarch64)")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)([=<>]=\S+)((?: \\\n +\S+)*)$", flags=re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class ConstraintsFailed(Exception):
    """An index does not answer, or has no compatible versions; the message has the cause."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The version of a package, such as "==1.0", and the SHA-256 of its files."""

    specifier: str
    hashes: frozenset[str]


def read(text: str) -> dict[str, Pin]:
    """Returns the pins of a constraints.txt, by canonical name."""
    return {
        canonicalize_name(each[1]): Pin(each[2], frozenset(_HASH.findall(each[3])))
        for each in _PIN.finditer(text)
    }


def write(pins: dict[str, Pin]) -> str:
    """Returns the text of a constraints.txt."""
    blocks = [
        " \\\n    ".join(
            [name + pin.specifier, *(f"--hash=sha256:{h}" for h in sorted(pin.hashes))]
        )
        for name, pin in sorted(pins.items())
    ]
    return "\n".join([HEADER.rstrip(), *blocks, ""])


def current(folder: Path, upgrade: Iterable[str] = ()) -> dict[str, Pin]:
    """Returns the pins that the project in `folder` should have. Raises ConstraintsFailed."""
    before = read((folder / CONSTRAINTS).read_text())
    newest = {canonicalize_name(name) for name in upgrade}
    kept = [name + pin.specifier for name, pin in before.items() if name not in newest]
    extras = tomllib.loads((folder / PYPROJECT).read_text())["project"]["optional-dependencies"]
    wanted = [*requirements(folder, extras), *build_requirements(folder), "pip"]
    apart = [each for each in wanted if each.startswith(f"{APART}==")]
    pins = resolve([each for each in wanted if each not in apart], kept)
    for each in apart:
        pins[APART] = _either(resolve([each], [], "--no-deps")[APART], pins[APART])
    if "torch" in pins:
        pins["torch"] = _with_cpu_builds(pins["torch"], before.get("torch"), folder)
    return pins


def _either(older: Pin, newer: Pin) -> Pin:
    """Allows both versions; a version between them has none of the hashes."""
    between = f">={older.specifier[2:]},<={newer.specifier[2:]}"
    return Pin(between, older.hashes | newer.hashes)


def resolve(wanted: list[str], constraints: list[str], *options: str) -> dict[str, Pin]:
    """Returns pins of `wanted` and of all their dependencies, for any Python that we support.
    Raises ConstraintsFailed."""
    with tempfile.TemporaryDirectory(prefix="loadout-constraints-") as name:
        folder = Path(name)
        (folder / "wanted.txt").write_text("\n".join(wanted))
        (folder / "constraints.txt").write_text("\n".join(constraints))
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile"),
            *("wanted.txt", "--constraints", "constraints.txt"),
            *("--universal", "--python-version", _oldest_python(), "--quiet", "--no-config"),
            *("--output-file", "pylock.toml", *options),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConstraintsFailed(done.stderr.strip())
        locked = tomllib.loads((folder / "pylock.toml").read_text())
    found = {
        canonicalize_name(each["name"]): Pin("==" + each["version"], _hashes(each))
        for each in locked["packages"]
    }
    return {name: pin for name, pin in found.items() if pin.hashes}


def _oldest_python() -> str:
    project = tomllib.loads((ROOT / PYPROJECT).read_text())["project"]
    return str(project["requires-python"]).removeprefix(">=")


def _hashes(package: dict[str, Any]) -> frozenset[str]:
    """Returns the hashes of a package's source and of its wheels for Linux with glibc."""
    files = [each for each in package.get("wheels", []) if _is_for_us(_file_name(each))]
    files += [package["sdist"]] if "sdist" in package else []
    return frozenset(each["hashes"]["sha256"] for each in files)


def _file_name(file: dict[str, Any]) -> str:
    return str(file.get("name") or file["url"].rpartition("/")[2])


def _is_for_us(name: str) -> bool:
    platforms = name.removesuffix(".whl").rpartition("-")[2].split(".")
    return any(_LINUX.fullmatch(each) for each in platforms)


def _with_cpu_builds(torch: Pin, before: Pin | None, folder: Path) -> Pin:
    """Adds the files of torch's own index for CPUs, which images install. If the index does not
    answer, the known files of this version stay."""
    index = re.search(r"^CPU_TORCH_INDEX=(\S+)$", (folder / VERSIONS).read_text(), re.MULTILINE)
    assert index is not None, f"{VERSIONS} names no index of torch for CPUs"
    build = f"torch{torch.specifier}+cpu"
    try:
        found = resolve([build], [], "--no-deps", "--default-index", index[1])["torch"].hashes
    except ConstraintsFailed as error:
        if before is None or before.specifier != torch.specifier or before.hashes <= torch.hashes:
            raise ConstraintsFailed(f"no hashes of {build}: {error}") from None
        print(f"{index[1]} does not answer: the known hashes of {build} stay")
        found = before.hashes
    return Pin(torch.specifier, torch.hashes | found)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.packaging.constraints", description=__doc__
    )
    parser.add_argument("--upgrade", nargs="+", default=[], metavar="NAME")
    upgrade: list[str] = parser.parse_args().upgrade
    try:
        pins = current(ROOT, upgrade)
    except ConstraintsFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (ROOT / CONSTRAINTS).write_text(write(pins))
    print(f"{len(pins)} packages, {sum(len(pin.hashes) for pin in pins.values())} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
