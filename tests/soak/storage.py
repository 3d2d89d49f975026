"""What the stores stand on: the catalog's database, and where blobs and images are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from sqlalchemy import Engine, create_engine

from tests.soak.leftovers import find_local_orphans, find_orphan_records


class Ground(Protocol):
    """Lasts as long as its context."""

    num_replicas: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def settings(self, index: int, data_dir: Path) -> dict[str, Any]:
        """Settings of replica `index` besides those that all stores have."""

    def settle(self, index: int) -> None:
        """Returns when nothing that a killed replica had asked for can still happen."""

    def find_orphans(self, data_dirs: Sequence[Path]) -> list[str]:
        """What nobody needs any more, and what is missing."""


class SqliteGround:
    """One store, and all of it in its own folder."""

    num_replicas = 1

    def __enter__(self) -> Self:
        self._engine: Engine | None = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def settings(self, index: int, data_dir: Path) -> dict[str, Any]:
        return {"data_dir": data_dir}

    def settle(self, index: int) -> None:
        """With the process its transaction is gone."""

    def find_orphans(self, data_dirs: Sequence[Path]) -> list[str]:
        (data_dir,) = data_dirs
        if self._engine is None:
            self._engine = create_engine(f"sqlite:///{data_dir / 'catalog.sqlite3'}")
        records, digests = find_orphan_records(self._engine)
        return records + find_local_orphans(data_dir, digests)
