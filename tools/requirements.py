"""What pip installs for us, as requirement files: before anything is installed, so with the
standard library alone.

    python tools/requirements.py postgres otel   # the project's, and of two extras
    python tools/requirements.py --alone sbom    # of an extra without the project's
    python tools/requirements.py --build         # what builds the project
    python tools/requirements.py --pip           # pip, with its version and hashes
    python tools/requirements.py --cpu-torch     # torch's build for CPUs, with its version

Versions and hashes of the others are in constraints.txt, which that pip applies:
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
    extra that there is not."""
    return [*_project(folder)["dependencies"], *extra_requirements(folder, extras)]


def extra_requirements(folder: Path, extras: Iterable[str]) -> list[str]:
    """Returns the dependencies of extras alone, and of the extras that these name. Raises KeyError
    for an extra that there is not."""
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
    """Returns what the project's wheel is built with."""
    requires: list[str] = tomllib.loads((folder / PYPROJECT).read_text())["build-system"][
        "requires"
    ]
    return requires


def pinned_pip(folder: Path) -> str:
    """Returns pip's own lines of constraints.txt. A requirement with hashes is checked by a pip,
    too, that does not know of hashes of constraints yet."""
    return _pinned(folder, r"pip==\S+( \\\n +--hash=\S+)+")


def cpu_torch(folder: Path) -> str:
    """Returns the requirement of torch's build for CPUs, in the version of constraints.txt. An
    index for CPUs has it, PyPI has not."""
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
    parser = argparse.ArgumentParser(description="Prints requirements, one a line.")
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
