"""A small layout, and an adapter store in memory with images for it."""

from __future__ import annotations

import pytest

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.pulls import threads
from tests.support.inference.memory_store import MemoryStore, small_layout
from tests.support.wait import TIMEOUT_S


@pytest.fixture(autouse=True)
def late_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls wait for a late grant: on a busy machine a test's loop may answer after PARK_AFTER_S,
    and a parked pull asks the store again. Pulls that are refused memory are parked at once."""
    monkeypatch.setattr(threads, "PARK_AFTER_S", TIMEOUT_S)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def layout() -> ModelLayout:
    return small_layout()
