"""Files that commands write: for their owner only, and whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """To be written; takes its place when the context ends well. Raises OSError."""
    number, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def stamp() -> str:
    """The time, for a file's name."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
