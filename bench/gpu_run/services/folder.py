"""Makes the folder that the services run from: our packages with their generated modules, and the
packages of others that are not installed.

The generated modules are not committed, and a Python package lies in one folder, so that ours are
copied there.
"""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from pathlib import Path

from bench.gpu_run.context import Missing
from bench.gpu_run.pack import wheels

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "loadout",
    "contract",
    "servicekit",
    "adapter_store",
    "inference_svc",
    "kernels",
    "bench",
)
STUBS, STUBS_OF = "stubs", "protos.sha256"
STUB_PATTERN = "loadout/*/v1/*_pb2*.py"
PROTOS = ROOT / "protos"
HOW = "run `make gpu-pack` and copy the pack here"


def make(pack: Path, target: Path) -> list[str]:
    """Makes the folder, and returns the names of the wheels that it has. Raises Missing for
    packages or generated modules that are neither here nor in the pack."""
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "results", "assets")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    _add_stubs(pack, target)
    _add_metadata(target)
    installed = wheels.install(pack, target)
    lacking = wheels.missing(target)
    if lacking:
        raise Missing(f"the services need {', '.join(lacking)}: {HOW}")
    return installed


def pack_stubs(pack: Path) -> None:
    """Copies the generated modules into the pack, with the digest of their sources."""
    for path in _stubs(ROOT):
        copy = pack / STUBS / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (pack / STUBS / STUBS_OF).write_text(_protos_digest())


def _add_stubs(pack: Path, target: Path) -> None:
    """Adds the generated modules from the pack, unless they have been made in the checkout."""
    if len(_stubs(ROOT)) == 2 * len(list(PROTOS.rglob("*.proto"))):
        return
    digest = pack / STUBS / STUBS_OF
    if not digest.is_file():
        raise Missing(f"the modules generated from protos/ are not here: {HOW}")
    if digest.read_text() != _protos_digest():
        raise Missing(f"the pack's modules are generated from other protos: {HOW}")
    shutil.copytree(pack / STUBS, target, dirs_exist_ok=True)


def _stubs(folder: Path) -> list[Path]:
    return sorted(folder.glob(STUB_PATTERN))


def _protos_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(PROTOS.rglob("*.proto")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _add_metadata(target: Path) -> None:
    """The services read their version from the metadata of an installed package."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    folder = target / f"loadout-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: loadout\nVersion: {version}\n"
    (folder / "METADATA").write_text(text)
