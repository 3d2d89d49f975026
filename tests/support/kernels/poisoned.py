"""Memory that is NaN until a kernel writes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

POISONED_PACKAGES = ("kernels.", "inference_svc.")


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An allocator whose memory is NaN when our packages ask, so that an output element that a
    kernel forgets, or a scratch element that it reads unwritten, shows."""

    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if tensor.is_floating_point() and caller.startswith(POISONED_PACKAGES):
            tensor.fill_(float("nan"))
        return tensor

    return allocate_poisoned
