"""A small layout, and an adapter store in memory with images for it."""

from __future__ import annotations

import pytest

from inference_svc.adapters.layout import ModelLayout
from tests.support.inference.memory_store import MemoryStore, small_layout


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def layout() -> ModelLayout:
    return small_layout()
