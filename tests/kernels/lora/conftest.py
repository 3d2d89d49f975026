"""Adapters in an arena, batches by popularity, and a process that runs the Triton kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.kernels.adapters import RATIOS, Adapters, Interpreter, build_adapters
from tests.support.kernels.popularity import popular_slots, with_base_rows

OPERATIONS = Path(__file__).parent / "operations.py"


@pytest.fixture(scope="session")
def make_adapters():
    """`make_adapters(dtype, in_features, out_features, vocab)`; made once per combination."""
    made: dict[Any, Adapters] = {}

    def make(
        dtype: torch.dtype, in_features: int = 70, out_features: tuple[int, ...] = (96, 33, 40),
        vocab: int = 50,
    ) -> Adapters:  # fmt: skip
        key = (dtype, in_features, out_features, vocab)
        if key not in made:
            made[key] = build_adapters(*key)
        return made[key]

    return make


@pytest.fixture(scope="session")
def ratio_of():
    return RATIOS.__getitem__


@pytest.fixture(scope="session")
def slots_of():
    """`slots_of(popularity, num_rows, mixed)`."""

    def slots(popularity: str, num_rows: int, mixed: bool = False) -> list[int]:
        found = popular_slots(popularity, num_rows)
        return with_base_rows(found) if mixed else found

    return slots


@pytest.fixture(scope="session")
def interpreter(start_worker):
    return Interpreter(start_worker(OPERATIONS, interpret=True).call)


@pytest.fixture(scope="session")
def compiler(start_worker):
    return start_worker(OPERATIONS, interpret=False)
