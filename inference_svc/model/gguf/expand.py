"""A GGUF file as a model's folder: the small files beside it are made of its metadata.

Everything that reads a model then sees a folder as Hugging Face saves it, whose weights are one
.gguf in place of safetensors.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import CONFIG, gguf_files, is_gguf
from inference_svc.model.checkpoint.generation_config import FILE_NAME as GENERATION_CONFIG


@contextmanager
def expanded(model: Path, *, has_tokenizer: bool = True) -> Iterator[Path]:
    """Yields the folder of a model: a folder of its own for as long as the context, if `model` is a
    GGUF file or a folder with one and without config.json, else `model` itself.

    Raises UnsupportedModel for a file that is not served, and for several files; OSError where no
    folder can be written.
    """
    path = gguf_of(model)
    if path is None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="loadout-gguf-") as folder:
        write_folder(path, Path(folder), has_tokenizer=has_tokenizer)
        yield Path(folder)


def gguf_of(model: Path) -> Path | None:
    """Returns the GGUF file that `model` is, or has in place of other files; None if it has others.
    Raises UnsupportedModel for a folder with several."""
    if is_gguf(model):
        return model
    if (model / CONFIG).exists():
        return None
    found = gguf_files(model)
    if len(found) > 1:
        raise UnsupportedModel(
            f"{model} has {len(found)} GGUF files: name the file to serve, such as {found[0]}; "
            "parts of one model are joined with llama-gguf-split --merge"
        )
    return found[0] if found else None


def write_folder(path: Path, folder: Path, *, has_tokenizer: bool = True) -> None:
    """Writes config, tokenizer and generation config of a GGUF file into a folder, and a link to
    it. Raises UnsupportedModel as reading does, and OSError."""
    # Imports torch, which other models' settings are checked without.
    from inference_svc.model.gguf.config import config_of, generation_config_of
    from inference_svc.model.gguf.file import read_header
    from inference_svc.model.gguf.tokenizer import tokenizer_files

    header = read_header(path)
    _write_json(folder / CONFIG, config_of(header))
    if has_tokenizer:
        for name, text in tokenizer_files(header).items():
            (folder / name).write_text(text, encoding="utf-8")
    _write_json(folder / GENERATION_CONFIG, generation_config_of(header))
    (folder / path.name).symlink_to(path.resolve())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
