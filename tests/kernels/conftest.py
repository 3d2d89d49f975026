"""What every kernel test shares: one measure of closeness, and memory that punishes omissions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
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


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture(scope="session")
def assert_close():
    """`assert_close(name, ref, got, ratio)`: root mean square of the error over that of `ref`."""

    def check(name: str, ref: torch.Tensor, got: torch.Tensor, ratio: float) -> None:
        assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(ref.shape)}"
        assert got.dtype == ref.dtype, f"{name}: {got.dtype}, not {ref.dtype}"
        assert got.isfinite().all(), f"{name}: {int((~got.isfinite()).sum())} values not finite"
        ref, got = ref.double(), got.double()
        error = float((got - ref).square().mean().sqrt())
        scale = float(ref.square().mean().sqrt())
        assert error <= ratio * scale, f"{name}: relative RMS {error / scale:.1e} > {ratio:.1e}"

    return check
