"""Copies of small host data to a device, without waiting for the device's computations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Sequence[Any], device: torch.device) -> Tensor:
    """Returns `values` on `device`, in their shape and dtype. From memory that is not pinned a copy
    would wait for the step that computes."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
