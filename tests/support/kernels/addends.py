"""Addends of tokens with adapters and without."""

from __future__ import annotations

import torch

from kernels.elementwise.addend import Addend


def random_addend(num_tokens: int, size: int, dtype: torch.dtype) -> Addend:
    """Every third token has no adapter, and values that spoil any sum."""
    values = (torch.randn(num_tokens, size) * 3).to(dtype)
    slots = torch.tensor([-1 if token % 3 == 1 else token for token in range(num_tokens)])
    values[slots < 0] = torch.nan
    return Addend(values, slots.to(torch.int32))
