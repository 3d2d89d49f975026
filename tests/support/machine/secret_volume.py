"""A folder whose files change as those of a Secret do in a pod."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path


class SecretVolume:
    """Links to files behind a link `..data`, which each change replaces at once, as the kubelet
    does."""

    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        path.mkdir()
        self.path = path
        self._versions = itertools.count()
        self.replace(files)
        for name in files:
            (path / name).symlink_to(f"..data/{name}")

    def replace(self, files: dict[str, bytes]) -> None:
        """Makes these the files, and removes the ones before."""
        link = self.path / "..data"
        before = link.resolve() if link.is_symlink() else None
        version = self.path / f"..version_{next(self._versions)}"
        version.mkdir()
        for name, data in files.items():
            (version / name).write_bytes(data)
        fresh = self.path / "..data_tmp"
        fresh.symlink_to(version.name)
        fresh.replace(link)
        if before is not None:
            shutil.rmtree(before)
