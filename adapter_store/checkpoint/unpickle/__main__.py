"""Converts pickled weights to safetensors: the program of a sandboxed child process.

Run as `python -I .../__main__.py PICKLE OUTPUT RESULT MEMORY_BYTES CPU_SECONDS MAX_ENTRIES`, by
its path: it imports nothing of ours, so that nothing of ours is in its memory. RESULT gets one JSON
object: {} or {"reason": ..., "detail": ...}. The limits are set once torch is imported and before
the first byte of the untrusted file is read.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import resource
import signal
import struct
import sys
import warnings
import zipfile
from collections.abc import Mapping

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
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


class Refused(Exception):
    """Raised to refuse the file. `reason` is for programs, the message for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def set_limits(memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Sets the limits from here on, in addition to the use of importing torch."""
    with open("/proc/self/statm") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    used_seconds = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
    for kind, limit in (
        (resource.RLIMIT_AS, mapped_bytes + memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
    ):
        resource.setrlimit(kind, (limit, limit))
    # SIGXCPU at the soft limit, which the parent recognises; SIGKILL at the hard one.
    cpu_seconds += used_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


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


def convert(source: str, output: str, memory_bytes: int, cpu_seconds: int, entries: int) -> None:
    """Writes the tensors of a pickle as safetensors, within these limits. Raises Refused."""
    with open(source, "rb") as file:
        file_bytes = file.seek(0, 2)
    set_limits(memory_bytes, cpu_seconds, file_bytes + MAX_PICKLE_BYTES)
    try:
        check_archive(source, file_bytes, entries)
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


def main() -> None:
    warnings.simplefilter("ignore")
    source, output, result_path, *numbers = sys.argv[1:]
    memory_bytes, cpu_seconds, entries = map(int, numbers)
    result: dict[str, str] = {}
    try:
        convert(source, output, memory_bytes, cpu_seconds, entries)
    except Refused as refused:
        result = {"reason": refused.reason, "detail": str(refused)}
    except Exception as error:  # any error that a damaged archive makes the libraries raise
        detail = f"{type(error).__name__}: {_first_line(error)}" if str(error) else ""
        result = {"reason": "PICKLE_INVALID", "detail": detail}
    with open(result_path, "x") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
