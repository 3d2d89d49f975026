"""A real store in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.store.catalogs import make_data_folder
from tests.support.store.served import Served, serving


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Served]:
    make_data_folder(tmp_path / "data")
    with serving(tmp_path) as start:
        yield start()
