"""Wheels of the packages that the services need and the device's machine lacks."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from bench.gpu_run.context import Missing

WHEELS = "wheels"
NAMES = (
    "alembic",
    "annotated-types",
    "cffi",
    "cryptography",
    "googleapis-common-protos",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "grpcio-status",
    "mako",
    "protobuf",
    "pycparser",
    "pydantic",
    "pydantic-core",
    "pydantic-settings",
    "python-dotenv",
    "sqlalchemy",
    "starlette",
    "typing-extensions",
    "typing-inspection",
    "uvicorn",
)
"""The machine has some of them, but perhaps in versions older than our generated code needs."""
THERE = ("torch", "safetensors", "numpy", "regex", "jinja2", "prometheus-client")
"""Packages of the machine's own; torch for its driver would be too large for the pack."""
UNUSED = ("boto3", "huggingface_hub", "llguidance", "pillow", "transformers", "typer", "rich")
"""Requirements of ours without a part in the stage: sources on S3 and on the hub, forms of answers,
images in prompts, templates of chats, the command line."""
PYTHON_VERSION, GLIBC = "3.12", ("_2_34", "_2_28", "_2_17", "2014")
CONSTRAINTS = Path("constraints.txt")


def fetch(folder: Path) -> list[str]:
    """Downloads the wheels for the device's machine, in the versions of our constraints, with their
    hashes, and returns their names. Raises CalledProcessError."""
    tags = ["--python-version", PYTHON_VERSION, "--implementation", "cp"]
    for abi in (f"cp{PYTHON_VERSION.replace('.', '')}", "abi3", "none"):
        tags += ["--abi", abi]
    for platform in (*(f"manylinux{version}_x86_64" for version in GLIBC), "any"):
        tags += ["--platform", platform]
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary=:all:", "--require-hashes", "--constraint", str(CONSTRAINTS)]
    subprocess.run([*pip, "--dest", str(folder), *tags, *NAMES], check=True)
    return sorted(path.name for path in folder.glob("*.whl"))


def install(pack: Path, target: Path) -> list[str]:
    """Installs the pack's wheels into `target`, except those whose very version is installed, and
    returns their names. Raises Missing if pip cannot."""
    wheels = [wheel for wheel in sorted((pack / WHEELS).glob("*.whl")) if not _is_there(wheel)]
    if not wheels:
        return []
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-compile", "--target", str(target)]
    done = subprocess.run([*pip, *map(str, wheels)], capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"the pack's wheels cannot be installed: {done.stderr.strip()[-1000:]}")
    return [wheel.name for wheel in wheels]


def missing(target: Path) -> list[str]:
    """Returns the packages that are neither in `target` nor installed."""
    there = {_normal(each) for each in Distribution.discover(path=[str(target)])}
    return [name for name in (*NAMES, *THERE) if name not in there and _version(name) is None]


def _is_there(wheel: Path) -> bool:
    name, version = wheel.name.split("-")[:2]
    return _version(name) == version


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _normal(found: Distribution) -> str:
    return found.metadata["Name"].lower().replace("_", "-")
