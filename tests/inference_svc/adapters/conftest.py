"""A small layout, and an adapter store in memory with images for it."""

from __future__ import annotations

import pytest
import torch

from inference_svc.adapters.layout import IMAGE_FORMATS, LayoutTarget, ModelLayout
from tests.support.inference.memory_store import IN, OUT, MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def layout() -> ModelLayout:
    targets = tuple(
        LayoutTarget(f"model.layers.{i}.mlp.up_proj", i, f"layers.{i}.up", "linear", IN, OUT)
        for i in range(3)
    )
    return ModelLayout("base", "0" * 64, torch.float32, IMAGE_FORMATS, targets)
