"""`make test-gpu-versions` runs tests/gpu and the GPU run with the versions of the GPU's machine,
and with nothing else installed.

    python -m tools.packaging.gpu_versions --python python3.12

It makes an environment in build/gpu-versions with this Python, torch, Triton, numpy and pytest.
There it collects and emulates all of tests/gpu, and runs every stage of the GPU run in emulation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

PYTHON_VERSION = "3.12"
PACKAGES = ("torch==2.11.0", "triton==3.6.0", "numpy", "pytest")
"""Any build of torch will do; a build for CPUs is smaller, if pip's index has one."""
FOLDER = Path("build/gpu-versions")
STAMP = FOLDER / "packages.txt"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.packaging.gpu_versions", description=__doc__)
    parser.add_argument(
        "--python", help=f"a Python {PYTHON_VERSION}; by default found automatically"
    )
    options = parser.parse_args()
    chosen = find_python([options.python] if options.python else candidates())
    if chosen is None:
        where = options.python or "on PATH, in pyenv's folder, or of uv"
        print(
            f"error: no Python {PYTHON_VERSION} {where}; GPU_PYTHON=/path/to/python3.12 names one",
            file=sys.stderr,
        )
        return 2
    python = install(chosen)
    # Without the peers, whose requirements are the same, and without the services, which have more.
    pack = FOLDER / "pack"
    run(sys.executable, "-m", "bench.gpu_run.pack", "--no-downloads", "--out", str(pack))
    pytest = [python, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    run(*pytest, "--collect-only", "tests/gpu", emulates=True)
    run(*pytest, "tests/gpu", emulates=True)
    out = FOLDER / "out"
    command = [python, "-m", "bench.gpu_run", "--emulate", "--stages", "0-9"]
    run(*command, "--pack", str(pack), "--out", str(out))
    return 0


def candidates() -> list[str]:
    """Returns possible places of a Python of this version."""
    name = f"python{PYTHON_VERSION}"
    pyenv = Path.home() / ".pyenv/versions"
    found = [name, *map(str, sorted(pyenv.glob(f"{PYTHON_VERSION}.*/bin/{name}")))]
    if shutil.which("uv"):
        done = subprocess.run(
            ["uv", "python", "find", PYTHON_VERSION], capture_output=True, text=True
        )
        found += done.stdout.split()
    return found


def find_python(names: list[str]) -> str | None:
    """Returns the first Python that runs and has this version; a shim of pyenv's may do neither."""
    for name in names:
        try:
            done = subprocess.run([name, "--version"], capture_output=True, text=True)
        except OSError:
            continue
        if done.stdout.startswith(f"Python {PYTHON_VERSION}."):
            return name
    return None


def install(python: str) -> str:
    """Makes the environment unless it exists with these packages, and returns its Python."""
    wanted = "\n".join(PACKAGES)
    inside = str((FOLDER / "env/bin/python").absolute())
    if not STAMP.is_file() or STAMP.read_text() != wanted:
        run(python, "-m", "venv", "--clear", str(FOLDER / "env"))
        run(inside, "-m", "pip", "install", "--quiet", *PACKAGES)
        STAMP.write_text(wanted)
    return inside


def run(*command: str, emulates: bool = False) -> None:
    """Runs a command. Raises SystemExit with its status if it fails."""
    print("+", *command, flush=True)
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if emulates else {})
    status = subprocess.run(command, env=environment).returncode
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    sys.exit(main())
