"""Weights of a base model's folder, as transformers saves one: read one at a time, or compared.

The folder is the user's own: its files may be links to anywhere, and safetensors maps them.
"""

from __future__ import annotations

from fnmatch import filter as matching
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from adapter_store.checkpoint.open import TORCH_DTYPES
from adapter_store.checkpoint.peft.tensor_keys import target_of
from adapter_store.checkpoint.reading.files import OpenFile
from adapter_store.checkpoint.reading.json import parse_object
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import MAX_CONFIG_BYTES, MODEL_CONFIG
from contract.folders import FileMissing, GivenFolder
from servicekit.errors import InvalidArgument

MODEL_FILES = "*.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS_AT_ONCE = 8192


def open_safetensors(path: Path) -> Any:
    """Opens a file with safetensors, links followed. Raises InvalidAdapter FILE_NOT_SAFETENSORS."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise InvalidAdapter(
            f"{path}: {error}", subject=path.name, reason="FILE_NOT_SAFETENSORS"
        ) from error


class SavedTensor:
    """A tensor of an adapter, whose rows are read from its open file, some at a time."""

    def __init__(self, file: OpenFile, record: TensorRecord) -> None:
        self._file, self._record = file, record
        self.shape = record.shape

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Returns rows [start, end) of a tensor that has some, [end - start, ...] of its dtype, in
        new memory. Raises CorruptData if the file has become shorter."""
        row_bytes = self._record.length_bytes // self.shape[0]
        data = bytearray((end - start) * row_bytes)
        self._file.read_into(self._record.offset + start * row_bytes, memoryview(data))
        flat = torch.frombuffer(data, dtype=TORCH_DTYPES[self._record.dtype])
        return flat.view(end - start, *self.shape[1:])


class BaseModel:
    """The weights of a model by the names that its text model gives them. Holds no file open, and
    no weight."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidArgument for a folder without weights, InvalidAdapter and FileRefused for a
        weight that cannot be read."""
        self.folder = folder
        self._places: dict[str, tuple[Path, str]] = {}
        with GivenFolder(folder, is_trusted=True) as own:
            for name in sorted(matching(own.names, MODEL_FILES)):
                own.open(name).close()  # safetensors would wait for a pipe
                with open_safetensors(folder / name) as file:
                    keys = file.keys()
                    self._places |= {target_of(key): (folder / name, key) for key in keys}
        if not self._places:
            raise InvalidArgument(f"{folder} has no {MODEL_FILES}", subject=str(folder))

    def read(self, name: str) -> torch.Tensor:
        """Returns a weight, [out, in] as it is saved, in its dtype, mapped from its file. Raises
        InvalidArgument without it."""
        if name not in self._places:
            raise InvalidArgument(
                f"{self.folder} has no tensor {name}: is it the model that the adapter was trained "
                "on, with all its files?",
                subject=name,
            )
        path, key = self._places[name]
        with open_safetensors(path) as file:
            return file.get_tensor(key)

    def has_tied_head(self) -> bool:
        """Returns whether embedding and head are one weight: the files have no head, or the config
        says so. Raises InvalidAdapter for a config that is no JSON object, and FileRefused."""
        if HEAD not in self._places:
            return True
        fields: dict[str, Any] = {}
        try:
            with GivenFolder(self.folder, is_trusted=True) as own, own.open(MODEL_CONFIG) as config:
                data = config.read_all(MAX_CONFIG_BYTES)
            fields = parse_object(data, str(self.folder / MODEL_CONFIG))
        except FileMissing:
            pass
        parts = [fields, fields.get("text_config")]
        return any(
            isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in parts
        )

    def difference(self, name: str, saved: SavedTensor) -> str:
        """Says how `saved` differs from the weight of this name, which an output layer without one
        shares with the embedding; "" if it does not."""
        place = self._places.get(name)
        if place is None and name == HEAD:
            place = self._places.get(EMBEDDING)
        if place is None:
            return f"is no tensor of {self.folder}"
        path, key = place
        with open_safetensors(path) as file:
            return _difference(saved, file.get_slice(key))


def _difference(saved: SavedTensor, base: Any) -> str:
    """Returns how many rows differ from the base's, in whose dtype they are compared: a copy that
    was saved wider is equal if narrowing it loses nothing."""
    shape, wanted = list(saved.shape), list(base.get_shape())
    if not shape or shape != wanted:
        num_added = shape[0] - wanted[0] if shape and shape[1:] == wanted[1:] else 0
        added = f": {num_added} tokens were added" if num_added > 0 else ""
        return f"is {shape}, and the base's {wanted}{added}"
    num_changed = 0
    for start in range(0, shape[0], ROWS_AT_ONCE):
        rows = saved.rows(start, min(shape[0], start + ROWS_AT_ONCE))
        expected = base[start : start + ROWS_AT_ONCE]
        same = rows.to(expected.dtype) == expected
        same &= expected.to(rows.dtype) == rows
        num_changed += int((~same.reshape(len(rows), -1).all(1)).sum())
    return f"differs from the base's in {num_changed} of {shape[0]} rows" if num_changed else ""
