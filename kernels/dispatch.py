"""Chooses an operation's implementation: for CPUs, or Triton's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_is_interpreted = False


def uses_triton(tensor: Tensor) -> bool:
    """Returns whether Triton's kernels compute with `tensor`, of any shape and dtype: on CUDA
    devices.
    """
    return _is_interpreted or tensor.device.type == "cuda"


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside this context, Triton's kernels also compute with CPU tensors, so that the whole path
    of a GPU runs without one. Triton must have been imported with TRITON_INTERPRET=1."""
    global _is_interpreted
    before, _is_interpreted = _is_interpreted, True
    try:
        yield
    finally:
        _is_interpreted = before
