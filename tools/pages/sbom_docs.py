"""Writes docs/sbom, the Python packages of each container image, without a build.

    python -m tools.pages.sbom_docs

pip resolves the Dockerfile's requirements for this machine's processor. The images have the same
list at /opt/loadout/sbom.cdx.json, with Debian's packages too (see docs/supply-chain.md).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from tools.packaging import sbom
from tools.packaging.requirements import CONSTRAINTS, PYPROJECT, cpu_torch, requirements

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "sbom"
EXTRAS = {"loadout-cpu": ("postgres", "otel"), "loadout-cuda": ("postgres", "otel", "gpu")}
"""Our extras that the Dockerfile installs."""


def report(image: str) -> dict[str, Any]:
    """Returns pip's report of a trial installation. Raises CalledProcessError."""
    is_cpu = image == "loadout-cpu"
    wanted = [*([cpu_torch(ROOT)] if is_cpu else []), *requirements(ROOT, EXTRAS[image])]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(wanted))
        file.flush()
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
            *("--quiet", "--quiet", "--report", "-", "--constraint", str(ROOT / CONSTRAINTS)),
            *("--no-require-hashes", "--requirement", file.name),
            # pip queries an index that does not answer once for each package.
            *(("--extra-index-url", _cpu_torch_index(), "--retries", "0") if is_cpu else ()),
        ]
        environment = dict(os.environ) if is_cpu else _without_local_builds()
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _cpu_torch_index() -> str:
    versions = (ROOT / "deploy/images/versions.env").read_text()
    [index] = re.findall(r"^CPU_TORCH_INDEX=(\S+)$", versions, flags=re.MULTILINE)
    return str(index)


def _without_local_builds() -> dict[str, str]:
    """Returns variables with which pip uses only its index, because this machine may have torch's
    build for CPUs."""
    kept = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


def main() -> None:
    version: str = tomllib.loads((ROOT / PYPROJECT).read_text())["project"]["version"]
    FOLDER.mkdir(exist_ok=True)
    for image in EXTRAS:
        found = report(image)
        text = sbom.document(image, version, sbom.packages(found), found["environment"])
        (FOLDER / f"{image}.cdx.json").write_text(text)
        print(f"{image}: {len(found['install'])} packages")


if __name__ == "__main__":
    main()
