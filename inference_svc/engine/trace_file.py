"""Writes a trace of steps into a file: bounded, and with nothing left behind."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from pathlib import Path

from torch.autograd.profiler import profile

from inference_svc.errors import NoRoom

MAX_EVENTS = 500_000
"""Some hundred MB of JSON, and seconds to write them."""
BYTES_PER_EVENT = 1000
"""Of JSON, at most; operators take a quarter of it, kernels on a device half."""
COMPRESS_LEVEL = 3
PREFIX = "loadout-trace-"


def make_folder() -> Path:
    """For one trace; nobody else may look into it."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def remove_folder(folder: Path) -> None:
    """Also one in which a trace is being written: that ends with an OSError then."""
    shutil.rmtree(folder, ignore_errors=True)


def write(profiler: profile, num_steps: int, folder: Path) -> str:
    """The path of a file beside the folder, with the gzipped trace. Raises NoRoom for one of too
    many events or without the space for them; OSError, and what the profiler raises."""
    results = profiler.kineto_results
    assert results is not None, "it has been stopped"
    _check_size(len(results.events()), num_steps, shutil.disk_usage(folder).free)
    plain, packed = folder / "trace.json", folder / "trace.json.gz"
    profiler.export_chrome_trace(str(plain))
    with (
        os.fdopen(os.open(packed, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file,
        gzip.GzipFile("", "wb", COMPRESS_LEVEL, file) as target,
        plain.open("rb") as source,
    ):
        shutil.copyfileobj(source, target, 1 << 20)
    return str(packed.rename(f"{folder}.json.gz"))


def _check_size(num_events: int, num_steps: int, free_bytes: int) -> None:
    if num_events > MAX_EVENTS:
        fitting = num_steps * MAX_EVENTS // num_events
        raise NoRoom(
            f"the trace of {num_steps} steps has {num_events} events, more than {MAX_EVENTS}: ask "
            f"for at most {max(1, fitting)} steps",
            subject="num_steps",
        )
    num_bytes = num_events * BYTES_PER_EVENT
    if num_bytes > free_bytes:
        raise NoRoom(
            f"the trace of {num_steps} steps takes up to {num_bytes} bytes of temporary files, and "
            f"{free_bytes} are free",
            subject="num_steps",
        )
