"""A folder for staging, and an adapter's files as a source has them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from adapter_store.sources.limits import FetchLimits
from adapter_store.sources.staging import Staging

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def make_staging(tmp_path):
    """make_staging(max_adapter_bytes=..., max_file_bytes=...): an empty staging folder."""
    numbers = itertools.count()

    def make(max_adapter_bytes: int = 1 << 20, max_file_bytes: int = 1 << 20) -> Staging:
        folder = tmp_path / f"staging{next(numbers)}"
        folder.mkdir()
        return Staging(folder, FetchLimits(max_adapter_bytes, max_file_bytes))

    return make


@pytest.fixture
def staging(make_staging) -> Staging:
    return make_staging()


@pytest.fixture
def write_adapter():
    """write_adapter(folder): files as an adapter has them; a source does not look inside."""

    def write(folder: Path, weights: bytes = b"w" * 1000) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_bytes(b"{}")
        (folder / WEIGHTS).write_bytes(weights)
        (folder / "README.md").write_text("not needed")
        (folder / "optimizer.pt").write_bytes(b"not needed")
        return folder

    return write
