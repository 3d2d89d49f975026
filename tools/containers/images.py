"""Builds our images from the Dockerfile's targets, as `make images` does."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tools.containers import bases, pip_sources
from tools.containers.engine import FOLDER, ROOT, run
from tools.packaging.install import cpu_torch_if_found

CPU_IMAGE = "localhost/loadout-cpu:0.3.0"
CUDA_IMAGE = "localhost/loadout-cuda:0.3.0"
PREVIOUS_IMAGE = "localhost/loadout-cpu:previous"
PREVIOUS_COMMIT = "9a54c74"
"""0.2.0, from which the tests upgrade a cluster to this checkout."""


def build(target: str, tag: str, context: Path = ROOT) -> None:
    """Builds `target` of the Dockerfile in `context`. Raises ContainersFailed."""
    log = FOLDER / f"build-{tag.rpartition('/')[2].replace(':', '-')}.log"
    print(f"building {tag}, see {log}", flush=True)
    pins = {
        "PYTHON_IMAGE": bases.PYTHON.name,
        "PYTHON_DIGEST": bases.digest(bases.PYTHON),
        "CPU_TORCH_INDEX": _pinned("CPU_TORCH_INDEX"),
    }
    arguments = [
        part for name, value in pins.items() for part in ("--build-arg", f"{name}={value}")
    ]
    run(
        "podman",
        "build",
        "--network",
        "host",
        "--file",
        str(context / "deploy/images/Dockerfile"),
        # torch for CPUs in the CUDA image too, because CUDA's libraries have gigabytes and no test.
        *pip_sources.build_options(cpu_torch_if_found()),
        *arguments,
        "--target",
        target,
        "--tag",
        tag,
        str(context),
        log=log,
    )


def _pinned(name: str) -> str:
    lines = (ROOT / "deploy/images/versions.env").read_text().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith(f"{name}="))


def build_previous() -> None:
    """Builds the previous release, with one line changed for Debian's Python 3.11.2."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "previous.tar")
        run("git", "archive", "--output", str(archive), PREVIOUS_COMMIT, folder=ROOT)
        context = Path(folder, "previous")
        context.mkdir()
        run("tar", "--extract", "--file", str(archive), "--directory", str(context))
        file = context / "inference_svc/model/architectures.py"
        file.write_text(file.read_text().replace("NO_LAYER = ()", "NO_LAYER = frozenset()"))
        build("cpu", PREVIOUS_IMAGE, context)
