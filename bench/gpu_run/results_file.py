"""Reads and writes the file of results, which stays complete if the run is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NAME = "results.json"

Results = dict[str, Any]


def read(folder: Path) -> Results:
    """Returns an earlier run's results in `folder`, or empty results."""
    path = folder / NAME
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def write(folder: Path, results: Results) -> None:
    """Replaces the file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{NAME}.partial"
    partial.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(partial, folder / NAME)
