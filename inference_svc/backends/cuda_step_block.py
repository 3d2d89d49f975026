"""Host memory that travels to the device as one piece: what changes with every step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256


class StepBlock:
    """`num_bytes` of host memory and their twin on `device`, both at fixed addresses.

    On CUDA the host side is pinned and `send` does not wait; the host may write again once `wait`
    has returned. On the CPU both sides are the same memory. One tensor, made by `zeros_at_end`,
    lies behind all others: of it `send` copies only the rows in use.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._twin = self._host.to(device)
        self._used_bytes = 0
        self._end = num_bytes
        self._last_row_bytes = 0
        self._sent = torch.cuda.Event() if self._is_cuda else None

    @property
    def num_bytes(self) -> int:
        """Of either side."""
        return len(self._host)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of the host side."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used_bytes
        assert start + num_bytes <= self._end, "the block is too small"
        self._used_bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._host[start : start + num_bytes].view(dtype).view(shape)

    def zeros_at_end(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """The one tensor that lies behind all others, whenever they are made."""
        assert self._end == len(self._host), "there is one already"
        num_bytes = math.prod(shape) * dtype.itemsize
        start = (self._end - num_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        assert start >= self._used_bytes, "the block is too small"
        self._end, self._last_row_bytes = start, num_bytes // shape[0]
        return self._host[start : start + num_bytes].view(dtype).view(shape)

    def on_device(self, tensor: Tensor) -> Tensor:
        """What `tensor`, of this block's host side, is on the device."""
        start = tensor.data_ptr() - self._host.data_ptr()
        assert 0 <= start <= len(self._host) - tensor.nbytes, "not of this block"
        return self._twin[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def send(self, num_last_rows: int) -> None:
        """One copy, ordered on the current stream: of everything but the rows behind
        `num_last_rows` of the tensor at the end, which on the device stay as they are."""
        if self._twin is not self._host:
            # What nobody took, before the tensor at the end, is less than a second copy costs.
            used = slice(0, self._end + num_last_rows * self._last_row_bytes)
            self._twin[used].copy_(self._host[used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Until what was sent has been read. A step ends with its tokens, and so rarely waits."""
        if self._sent is not None:
            self._sent.synchronize()
