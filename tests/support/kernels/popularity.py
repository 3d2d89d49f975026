"""Batches whose adapters are more or less popular."""

from __future__ import annotations

import math

import torch

from kernels.lora import BASE_SLOT


def popular_slots(popularity: str, num_rows: int) -> list[int]:
    """Slots of `num_rows` rows in batch order: neighbours share a slot, base rows come first."""
    if popularity == "empty":
        slots = [BASE_SLOT] * num_rows
    elif popularity == "identical":
        slots = [2] * num_rows
    elif popularity == "distinct":
        slots = list(range(num_rows))
    elif popularity == "uniform":
        slots = [row % math.ceil(math.sqrt(num_rows)) for row in range(num_rows)]
    elif popularity == "skewed":  # each adapter has 1.5 times the rows of the next
        slots = [int(math.log(row + 1, 1.5)) for row in range(num_rows)]
    else:
        generator = torch.Generator().manual_seed(num_rows)
        weights = torch.arange(1, 9).float() ** -1.5
        slots = torch.multinomial(weights, num_rows, True, generator=generator).tolist()
    return sorted(slots)


def with_base_rows(slots: list[int]) -> list[int]:
    """Every third row turned into a base row."""
    return sorted(BASE_SLOT if row % 3 == 2 else slot for row, slot in enumerate(slots))
