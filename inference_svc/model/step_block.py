"""Host memory that travels to the device as one piece: what changes with every step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256


class StepBlock:
    """`num_bytes` of host memory and their twin on `device`, both at fixed addresses.

    On CUDA the host side is pinned and `send` does not wait; the host may write again once `wait`
    has returned. On the CPU both sides are the same memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._twin = self._host.to(device)
        self._used_bytes = 0
        self._sent = torch.cuda.Event() if self._is_cuda else None

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of the host side."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used_bytes
        assert start + num_bytes <= len(self._host), "the block is too small"
        self._used_bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._host[start : start + num_bytes].view(dtype).view(shape)

    def on_device(self, tensor: Tensor) -> Tensor:
        """What `tensor`, made by `zeros`, is on the device."""
        start = tensor.data_ptr() - self._host.data_ptr()
        assert 0 <= start <= self._used_bytes, "not of this block"
        return self._twin[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def send(self) -> None:
        """One copy, ordered on the current stream."""
        if self._sent is not None:
            used = slice(0, self._used_bytes)
            self._twin[used].copy_(self._host[used], non_blocking=True)
            self._sent.record()

    def wait(self) -> None:
        """Until what was sent has been read. A step ends with its tokens, and so rarely waits."""
        if self._sent is not None:
            self._sent.synchronize()
