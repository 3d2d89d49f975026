"""Gives this machine's configuration of pip to an image's build: packages in local folders, and the
authority that signs a proxy's certificates."""

from __future__ import annotations

import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterable
from pathlib import Path

from tools.containers.engine import FOLDER

MOUNTED = "/machine"
"""The folder for this machine's folders during a build."""
CONSTRAINTS = "/etc/pip-constraints.txt"


def build_options(constraints: Iterable[str]) -> list[str]:
    """Writes a configuration with `constraints`, and returns the options of `podman build` that
    mount it."""
    found = _options()
    options: list[str] = []
    for folder in sorted({each for value in found.values() for each in _folders(value)}):
        options += ["--volume", f"{folder}:{MOUNTED}{folder}:ro"]
    lines = [f"{name} = {_relocated(value)}" for name, value in found.items()]
    file, constrained = FOLDER / "pip.conf", FOLDER / "pip-constraints.txt"
    constrained.write_text("\n".join(constraints))
    file.write_text("\n".join(["[global]", *lines, f"constraint = {CONSTRAINTS}", ""]))
    for here, there in ((file, "/etc/pip.conf"), (constrained, CONSTRAINTS)):
        options += ["--volume", f"{here}:{there}:ro"]
    return options


def _options() -> dict[str, str]:
    """Returns pip's options for the sources of packages."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.strip(":.").rpartition(".")[2].strip(".")
        if name in ("find-links", "index-url", "extra-index-url"):
            values = found.setdefault(name, [])
            values += [each for each in literal_eval(value).split() if each not in values]
    return {name: " ".join(values) for name, values in found.items()}


def _folders(value: str) -> list[Path]:
    """Returns the local folders of a value. An index links to files next to its folder, so its
    parent is returned."""
    paths = [Path(each.removeprefix("file://")) for each in value.split() if _is_local(each)]
    return [path.parent if path.name == "simple" else path for path in paths]


def _relocated(value: str) -> str:
    return " ".join(_relocate(each) if _is_local(each) else each for each in value.split())


def _relocate(place: str) -> str:
    scheme = "file://" if place.startswith("file://") else ""
    return f"{scheme}{MOUNTED}{place.removeprefix('file://')}"


def _is_local(place: str) -> bool:
    return place.startswith(("/", "file:///"))
