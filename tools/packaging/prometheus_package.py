"""Finds Prometheus' programs for tests and previews, and fetches them once.

    python -m tools.packaging.prometheus_package

If they are not installed, Debian's package is unpacked under `.tools/prometheus`, without an
installation in the system.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".tools" / "prometheus"
PACKAGE = "prometheus"
INSTALL = "install Prometheus 2.42 or newer, with promtool, so that both are on PATH"


class ProgramMissing(Exception):
    """Prometheus is missing or could not be fetched; the message has the next step."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of both programs."""

    prometheus: Path
    promtool: Path


def programs(folder: Path = FOLDER) -> Programs:
    """Finds the programs under `folder`, or on PATH. Raises ProgramMissing."""
    return Programs(_find("prometheus", folder), _find("promtool", folder))


def _find(name: str, folder: Path) -> Path:
    unpacked = folder / "usr" / "bin" / name
    if unpacked.is_file():
        return unpacked
    installed = shutil.which(name)
    if installed is None:
        raise ProgramMissing(
            f"{name} is neither in {folder} nor on PATH: "
            f"run `python -m tools.packaging.prometheus_package`, or {INSTALL}"
        )
    return Path(installed)


def fetch(folder: Path = FOLDER) -> None:
    """Unpacks Debian's package into `folder`, which appears when it is complete. Raises
    ProgramMissing."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ProgramMissing(f"this machine has no packages of Debian: {INSTALL}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="prometheus-") as work:
        package = _download(Path(work))
        unpacked = Path(work) / "unpacked"
        _run("dpkg-deb", "--extract", str(package), str(unpacked), folder=Path(work))
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)


def _download(work: Path) -> Path:
    """Downloads the package into `work`. If the system's lists of packages, which only root may
    renew, are empty or old, it uses our own lists."""
    try:
        _run("apt-get", "download", PACKAGE, folder=work)
    except ProgramMissing:
        own = _own_lists(work)
        _run("apt-get", *own, "update", folder=work)
        _run("apt-get", *own, "download", PACKAGE, folder=work)
    (package,) = work.glob("*.deb")
    return package


def _own_lists(work: Path) -> list[str]:
    """Returns the options of apt-get that keep its lists and caches in `work`."""
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    return [
        *("-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"),
        *("-o", "APT::Sandbox::User=", "-o", "Acquire::Languages=none"),
    ]


def _run(*command: str, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise ProgramMissing(f"`{' '.join(command)}` failed: {said}\n{INSTALL}")


def main() -> int:
    try:
        try:
            found = programs()
        except ProgramMissing:
            fetch()
            found = programs()
    except ProgramMissing as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{found.prometheus}, {found.promtool}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
