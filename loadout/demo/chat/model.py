"""The folder of SmolLM2 in the user's cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from loadout.demo.chat.download import DOWNLOAD_MB, GGUF_SHA256, Unavailable, gguf_file

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER_NAME = "SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"
CHECKSUMS = "checksums.json"
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
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
        console.print(f"downloading {FOLDER_NAME} once ({DOWNLOAD_MB} MB), to {cache}")
        _make(Path(making), console)
        if not _is_whole(folder):  # another demo may have made it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            (Path(making) / FOLDER_NAME).rename(folder)
    return folder


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
    content = {"format": FORMAT, "gguf": GGUF_SHA256, "files": _checksums(folder)}
    (folder / CHECKSUMS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    """Whether the folder has all files that were written, with their content."""
    try:
        made = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        expected = {"format": FORMAT, "gguf": GGUF_SHA256, "files": _checksums(folder)}
    except (OSError, ValueError):
        return False
    return bool(made == expected)


def _checksums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file but the checksums' own."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != CHECKSUMS:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
