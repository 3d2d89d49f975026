"""Prints requirements for pip. It runs before any installation, so it uses only the standard
library.

    python tools/packaging/requirements.py [OPTION] [EXTRA ...]

Without an option, it prints the requirements of the project and of the extras.

--alone      of the extras, without the project's
--build      of the project's build
--pip        pip, with its version and hashes
--cpu-torch  torch's build for CPUs, with its version

All other versions and hashes are in constraints.txt, which this version of pip applies:
`pip install --require-hashes --constraint constraints.txt --requirement FILE`.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PYPROJECT = "pyproject.toml"
CONSTRAINTS = "constraints.txt"


def requirements(folder: Path, extras: Iterable[str]) -> list[str]:
    """Returns the dependencies of the project in `folder` and of its extras. Raises KeyError for an
    unknown extra."""
    return [*_project(folder)["dependencies"], *extra_requirements(folder, extras)]


def extra_requirements(folder: Path, extras: Iterable[str]) -> list[str]:
    """Returns the dependencies of extras alone, and of the extras that these name. Raises KeyError
    for an unknown extra."""
    project = _project(folder)
    own = re.compile(rf"{re.escape(project['name'])}\[(.+)\]")
    found: list[str] = []
    left = list(extras)
    while left:
        for each in project["optional-dependencies"][left.pop(0)]:
            if named := own.fullmatch(each):
                left += named[1].split(",")
            elif each not in found:
                found.append(each)
    return found


def build_requirements(folder: Path) -> list[str]:
    """Returns the dependencies of the project's build."""
    requires: list[str] = tomllib.loads((folder / PYPROJECT).read_text())["build-system"][
        "requires"
    ]
    return requires


def pinned_pip(folder: Path) -> str:
    """Returns pip's own lines of constraints.txt. Even an old pip, which does not check hashes in
    constraints, checks a requirement's hashes."""
    return _pinned(folder, r"pip==\S+( \\\n +--hash=\S+)+")


def cpu_torch(folder: Path) -> str:
    """Returns the requirement of torch's build for CPUs, in the version of constraints.txt. It is
    on torch's index for CPUs, and not on PyPI."""
    return _pinned(folder, r"torch==[0-9.]+") + "+cpu"


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / PYPROJECT).read_text())["project"]
    return project


def _pinned(folder: Path, pattern: str) -> str:
    found = re.search(f"^{pattern}", (folder / CONSTRAINTS).read_text(), flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"{CONSTRAINTS} has no line like {pattern}")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints requirements, one on each line.")
    parser.add_argument("extras", nargs="*", help="extras of the project")
    kinds = parser.add_mutually_exclusive_group()
    for kind in ("alone", "build", "pip", "cpu-torch"):
        kinds.add_argument(f"--{kind}", action="store_true")
    arguments = parser.parse_args()
    folder = Path()
    if arguments.pip:
        found = [pinned_pip(folder)]
    elif arguments.cpu_torch:
        found = [cpu_torch(folder)]
    elif arguments.build:
        found = build_requirements(folder)
    elif arguments.alone:
        found = extra_requirements(folder, arguments.extras)
    else:
        found = requirements(folder, arguments.extras)
    print("\n".join(found))


if __name__ == "__main__":
    main()
