"""Converts pickled weights to safetensors: the task of a sandboxed process.

A request has `source`, `output` (the file to write) and `max_entries`. The kind of an answer is W,
written, or R, refused: the reason for programs and, on the next line, the detail for people.
"""

from __future__ import annotations

import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

MAX_PICKLE_BYTES = 16 << 20
"""The limit of the pickle itself, which names the tensors; their bytes are other entries."""

LOCAL_HEADER_BYTES = 30
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class Refused(Exception):
    """Raised to refuse the file. `reason` is for programs, the message for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def check_archive(path: str, file_bytes: int, max_entries: int) -> None:
    """Raises Refused if an entry claims more bytes than the file has, or is compressed."""
    if not zipfile.is_zipfile(path):
        raise Refused("PICKLE_NOT_ZIP", "not an archive as torch.save has written since 1.6")
    with zipfile.ZipFile(path) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    if len(entries) > max_entries:
        raise Refused("ZIP_TOO_MANY_ENTRIES", f"more than {max_entries} entries")
    if len({entry.filename for entry in entries}) != len(entries):
        raise Refused("ZIP_ENTRY_INVALID", "two entries have the same name")
    end = 0
    for entry in entries:
        name = ascii(entry.filename[:100])
        if entry.filename.startswith("/") or ".." in entry.filename.split("/"):
            raise Refused("ZIP_ENTRY_INVALID", f"{name} leads out of the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise Refused(
                "ZIP_BOMB", f"{name} is compressed, {entry.file_size} bytes; torch.save does not"
            )
        if entry.header_offset < end:
            raise Refused("ZIP_BOMB", f"{name} overlaps the entry before it")
        end = entry.header_offset + LOCAL_HEADER_BYTES + entry.file_size
        if end > file_bytes:
            raise Refused("ZIP_BOMB", f"{name} declares more bytes than the file has")
        if entry.filename.endswith("data.pkl") and entry.file_size > MAX_PICKLE_BYTES:
            raise Refused("PICKLE_TOO_LARGE", f"{name} has {entry.file_size} bytes")


def load(path: str) -> dict[str, torch.Tensor]:
    """Loads the tensors, mapped from the file. No class other than torch's own is instantiated.
    Raises Refused."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise Refused("PICKLE_REFUSED", _first_line(error)) from error
    if not isinstance(loaded, Mapping) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
    ):
        raise Refused("PICKLE_NOT_TENSORS", "not a map of names to tensors")
    return dict(loaded)


def check_tensors(tensors: dict[str, torch.Tensor], file_bytes: int) -> None:
    """Raises Refused for tensors that are not dense, of another dtype, or larger than the file."""
    total_bytes = 0
    for name, tensor in tensors.items():
        shown = ascii(name[:100])
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise Refused("PICKLE_NOT_TENSORS", f"{shown} is not a dense tensor")
        if tensor.dtype not in DTYPES:
            raise Refused("DTYPE_UNSUPPORTED", f"{shown} is {tensor.dtype}")
        total_bytes += tensor.numel() * tensor.element_size()
        # One stored number can pass for any number of elements (stride 0).
        if total_bytes > file_bytes:
            raise Refused("ZIP_BOMB", f"with {shown} the tensors are larger than the file")


def write(tensors: dict[str, torch.Tensor], path: str) -> None:
    """Writes safetensors, with one tensor in memory at a time."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def convert(source: str, output: str, max_entries: int) -> None:
    """Writes the tensors of a pickle as safetensors. Raises Refused."""
    with open(source, "rb") as file:
        file_bytes = file.seek(0, 2)
    try:
        check_archive(source, file_bytes, max_entries)
        tensors = load(source)
        check_tensors(tensors, file_bytes)
        write(tensors, output)
    except MemoryError as error:
        raise Refused("PICKLE_OUT_OF_MEMORY", "it needs more memory than it may take") from error
    except (OSError, RuntimeError) as error:
        if "allocate memory" in str(error):
            detail = "it needs more memory than it may take"
            raise Refused("PICKLE_OUT_OF_MEMORY", detail) from error
        raise


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    named = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
    return ascii(named)[1:300]


def answer(request: dict[str, Any]) -> tuple[bytes, str]:
    """Returns the kind of the answer, and its text."""
    warnings.simplefilter("ignore")
    try:
        convert(request["source"], request["output"], request["max_entries"])
    except Refused as refused:
        return b"R", f"{refused.reason}\n{refused}"
    except Exception as error:  # any error that a damaged archive makes the libraries raise
        detail = f"{type(error).__name__}: {_first_line(error)}" if str(error) else ""
        return b"R", f"PICKLE_INVALID\n{detail}"
    return b"W", ""
