"""The folder of SmolLM2 in the user's cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from loadout.demo.chat.download import GGUF_SHA256, Unavailable, gguf_file

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER_NAME = "SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"
CHECKSUMS = "checksums.json"
MAKING = "making-"
MAX_MAKING_S = 86400.0
FORMAT = 1
"""Counted up when the folder's content changes, so that older folders are made anew."""


def model_folder(cache: Path, console: Console) -> Path:
    """Returns the model's folder in `cache`, whole and unchanged since it was made; makes it if
    needed, and shows the progress.

    Raises:
        Unavailable: The model cannot be downloaded, or a package is missing.
        OSError: `cache` cannot be written, or its disk is full.
    """
    folder = cache / FOLDER_NAME
    if _is_whole(folder):
        return folder
    if find_spec("gguf") is None:
        raise Unavailable("the chat demo reads a GGUF file: pip install 'loadout[demo]'")
    cache.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=MAKING) as making:
        console.print(f"making the folder of {FOLDER_NAME} once, in {cache}", soft_wrap=True)
        _make(Path(making), console)
        _put(Path(making) / FOLDER_NAME, folder)
    return folder


def _put(made: Path, folder: Path) -> None:
    """Moves a folder to its place. Another demo may put the same there meanwhile."""
    try:
        if folder.exists() and not _is_whole(folder):
            shutil.rmtree(folder)
        made.rename(folder)
    except OSError as error:
        if not _is_whole(folder):
            raise OSError(
                f"{folder} cannot be replaced ({error}): remove it, or set XDG_CACHE_HOME to "
                "another folder"
            ) from error


def _remove_leftovers(cache: Path) -> None:
    """Removes the folders of demos that were killed while they made one."""
    for path in cache.glob(f"{MAKING}*"):
        if time.time() - path.stat().st_mtime > MAX_MAKING_S:
            shutil.rmtree(path, ignore_errors=True)


def _make(making: Path, console: Console) -> None:
    """Downloads the model, and writes its folder into `making`."""
    from loadout.demo.chat.gguf_model import write_folder  # torch, which takes a while to import

    gguf = gguf_file(making)
    folder = making / FOLDER_NAME
    folder.mkdir()
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console) as progress:
        task = progress.add_task("writing it in Hugging Face's format")

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        write_folder(gguf, folder, BASE_MODEL, END_OF_TURN, advance)
    names = sorted(path.name for path in folder.iterdir())
    content = {"format": FORMAT, "gguf": GGUF_SHA256, "files": _checksums(folder, names)}
    (folder / CHECKSUMS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    """Whether the folder has all files that were written, with their content. Others, such as a
    desktop's, do not matter."""
    try:
        made = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        found = _checksums(folder, made["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(made == {"format": FORMAT, "gguf": GGUF_SHA256, "files": found})


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of each of these files. Raises OSError."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
