"""The cache of Hugging Face's client, in which the files of a commit are links."""

from __future__ import annotations

import shutil
from pathlib import Path

REPOSITORY = "models--acme--french"
SNAPSHOT = f"{REPOSITORY}/snapshots/{'c' * 40}"


def linked(folder: Path, cache: Path) -> Path:
    """Moves an adapter to where a hub's client would have it; returns the folder of links."""
    files = [path for path in folder.iterdir() if path.is_file()]
    snapshot, repository = cache / SNAPSHOT, cache / REPOSITORY
    blobs = repository / "blobs"
    for each in (snapshot, blobs, repository / "refs"):
        each.mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    for number, path in enumerate(sorted(files)):
        shutil.move(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot
