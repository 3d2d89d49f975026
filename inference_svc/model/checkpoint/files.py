"""Says which files a model's folder has to have, and checks them before anything large is loaded.

The reader of the weights checks these, and the tokenizer's library the tokenizer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from contract.folders import POINTER
from inference_svc.errors import UnsupportedModel

CONFIG = "config.json"
GGUF = ".gguf"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MAX_HEADER_BYTES = 100_000_000
"""The most that safetensors accepts of a file's header."""
VOCABULARIES = (TOKENIZER, "tokenizer.model", "vocab.json")
"""Files of which a tokenizer has one."""
_COPY = "copy it from the model's source"
_SHARD = re.compile(r"[^/*?\[\x00-\x1f]+\.safetensors")
"""The name of a shard: of a file beside the index, and nothing that a download would take for a
pattern."""


def weight_files(model_dir: Path) -> list[Path]:
    """Returns the safetensors of a model's folder, which need not be there: `model.safetensors`, or
    the shards that `model.safetensors.index.json` names; or else its one GGUF file. Raises
    UnsupportedModel for an index that names none, or anything but safetensors beside it."""
    single, index = model_dir / SINGLE, model_dir / INDEX
    if single.exists():
        return [single]
    if not index.exists():
        found = gguf_files(model_dir)
        return found if len(found) == 1 else [single]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()), key=str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{index} cannot be read: {error!r}") from error
    if not names:
        raise UnsupportedModel(f"{index} names no file: {_COPY}")
    for name in names:
        if not (isinstance(name, str) and _SHARD.fullmatch(name)):
            raise UnsupportedModel(
                f"{index} names a file that is not a safetensors file in its folder: {name!r}"
            )
    return [index.parent / name for name in names]


def is_gguf(model: Path) -> bool:
    """Returns whether a model is named by its GGUF file."""
    return model.suffix == GGUF and model.is_file()


def gguf_files(model_dir: Path) -> list[Path]:
    """Returns the GGUF files of a folder, by their names; none if it is no folder."""
    return sorted(model_dir.glob(f"*{GGUF}"))


def weight_stamps(model_dir: Path) -> dict[Path, tuple[int, int, int]]:
    """Returns the inode, size and time of change in nanoseconds of each of `weight_files`, which
    differ once it is written or replaced. Raises OSError for a missing one."""
    stats = {path: path.stat() for path in weight_files(model_dir)}
    return {path: (each.st_ino, each.st_size, each.st_mtime_ns) for path, each in stats.items()}


def missing_files(model_dir: Path, *, has_tokenizer: bool = True) -> list[str]:
    """Returns the names of the files without which nothing can be served and that are not there;
    a server may do without a tokenizer. Raises UnsupportedModel like `weight_files`."""
    wanted = [model_dir / CONFIG, *weight_files(model_dir)]
    missing = [path.name for path in wanted if not path.is_file()]
    if has_tokenizer and not has_vocabulary(model_dir):
        missing.append(TOKENIZER)
    return missing


def has_vocabulary(model_dir: Path) -> bool:
    return any((model_dir / name).is_file() for name in VOCABULARIES)


def check_files(model_dir: Path, *, has_tokenizer: bool = True) -> None:
    """Raises UnsupportedModel naming the first file that is missing, or that is broken so that it
    shows in a moment, with a remedy."""
    for name in missing_files(model_dir, has_tokenizer=has_tokenizer):
        raise UnsupportedModel(f"{model_dir} has no {name}{_advice(model_dir, name)}")
    vocabularies = VOCABULARIES if has_tokenizer else ()
    names = (CONFIG, *vocabularies, *((TOKENIZER_CONFIG,) if has_tokenizer else ()))
    for path in (*weight_files(model_dir), *(model_dir / name for name in names)):
        _check_content(path)
    if has_tokenizer:
        check_tokenizer(model_dir)


def check_tokenizer(model_dir: Path) -> None:
    """Raises UnsupportedModel for a tokenizer.json without a vocabulary, and for JSON of the
    tokenizer that cannot be read."""
    tokenizer = _read(model_dir / TOKENIZER)
    _read(model_dir / TOKENIZER_CONFIG)
    model = None if tokenizer is None else tokenizer.get("model")
    if tokenizer is not None and not (isinstance(model, dict) and model.get("vocab")):
        raise UnsupportedModel(f"{model_dir / TOKENIZER} has no vocabulary: {_COPY}")


def _advice(model_dir: Path, name: str) -> str:
    """Returns the words after the name of a missing file."""
    if name == TOKENIZER:
        save = f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(model_dir)!r})"
        return (
            f": put the tokenizer's files there, in Python with {save}, or start "
            "with --no-tokenizer and send token ids"
        )
    if name == SINGLE:
        return f" and no {INDEX}{_advice_on_pickles(model_dir)}"
    return f": {_COPY}"


def _advice_on_pickles(model_dir: Path) -> str:
    """Returns the words after "no safetensors"."""
    pickle = min(model_dir.glob("pytorch_model*.bin"), default=None)
    if pickle is None:
        return ": weights are read from safetensors, as save_pretrained writes them"
    folder = repr(str(model_dir))
    return (
        f", but {pickle.name}: weights are read from safetensors; write them in Python with "
        f"from_pretrained({folder}).save_pretrained({folder}) of the model's class in transformers"
    )


def _check_content(path: Path) -> None:
    """Raises UnsupportedModel for a file that git has cloned without its content."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise UnsupportedModel(
                f"{path} is a pointer of Git LFS in place of the file: run git lfs pull in "
                f"{path.parent}"
            )


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the object that a JSON file holds, None if it is not there. Raises
    UnsupportedModel."""
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}; {_COPY}") from error
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file of the model holds. Raises UnsupportedModel."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UnsupportedModel(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content
