"""The one file of results, which a run that is killed leaves whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NAME = "results.json"

Results = dict[str, Any]


def read(folder: Path) -> Results:
    """Returns what an earlier run has left in `folder`; without one nothing."""
    path = folder / NAME
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def write(folder: Path, results: Results) -> None:
    """Replaces the file in one go."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{NAME}.partial"
    partial.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(partial, folder / NAME)
