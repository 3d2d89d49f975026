"""One step's inputs at fixed addresses on the device: filled on the host, sent in one copy."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from inference_svc.backends.native_buffers import StepArrays
from inference_svc.core import Batch
from inference_svc.model.inputs import StepInputs
from kernels.attention import AttentionPlan
from kernels.attention.plan import TILE_QUERIES, query_tiles

ALIGNMENT_BYTES = 256
NUM_TENSORS = 16
"""At least the number of tensors in a block."""


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
        """The size of each side."""
        return len(self._host)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocates a tensor of the host side."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used_bytes
        assert start + num_bytes <= self._end, "the block is too small"
        self._used_bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._host[start : start + num_bytes].view(dtype).view(shape)

    def zeros_at_end(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocates the one tensor that lies behind all others, whenever they are made."""
        assert self._end == len(self._host), "there is one already"
        num_bytes = math.prod(shape) * dtype.itemsize
        start = (self._end - num_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        assert start >= self._used_bytes, "the block is too small"
        self._end, self._last_row_bytes = start, num_bytes // shape[0]
        return self._host[start : start + num_bytes].view(dtype).view(shape)

    def on_device(self, tensor: Tensor) -> Tensor:
        """Returns the device's twin of `tensor`, which lies in this block's host side."""
        start = tensor.data_ptr() - self._host.data_ptr()
        assert 0 <= start <= len(self._host) - tensor.nbytes, "not of this block"
        return self._twin[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def send(self, num_last_rows: int) -> None:
        """Copies, at once and ordered on the current stream, everything but the rows behind
        `num_last_rows` of the tensor at the end, which on the device stay as they are."""
        if self._twin is not self._host:
            # The unused bytes before the tensor at the end cost less than a second copy.
            used = slice(0, self._end + num_last_rows * self._last_row_bytes)
            self._twin[used].copy_(self._host[used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Waits until what was sent has been read: rarely, as a step ends with its tokens."""
        if self._sent is not None:
            self._sent.synchronize()


class CudaInputs:
    """Steps of up to `max_tokens` tokens of up to `max_rows` sequences of `max_pages` pages each.

    `reserved_bytes` of `block` are left for other tensors that change with every step.
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        reserved_bytes: int,
    ) -> None:
        self.max_tokens, self.max_context = max_tokens, max_pages * page_size
        max_tiles = max_tokens // TILE_QUERIES + max_rows
        num_bytes = 24 * max_tokens + 16 * (max_rows + 1) + 8 * max_tiles + 12
        num_bytes += 4 * max_rows * max_pages + NUM_TENSORS * ALIGNMENT_BYTES
        self.block = StepBlock(num_bytes + reserved_bytes, device)
        # Rows of the page table that no sequence of the step has are not sent.
        self._arrays = StepArrays(
            max_tokens, max_rows, max_pages, page_size, self.block.zeros, self.block.zeros_at_end
        )
        self._tiles = self.block.zeros(max_tiles, 2, dtype=torch.int32)
        arrays, twin = self._arrays, self.block.on_device
        self._token_ids, self._positions = twin(arrays.token_ids), twin(arrays.positions)
        self._cells, self._logit_rows = twin(arrays.cells), twin(arrays.logit_rows)
        self._query_starts = twin(arrays.query_starts)
        self._context_lengths = twin(arrays.context_lengths)
        self._page_table, self._device_tiles = twin(arrays.page_table), twin(self._tiles)
        self._num_tiles = 0
        self._has_decodes = False

    def fill(self, batch: Batch) -> None:
        """Describes `batch` on the host."""
        self._arrays.fill(batch)
        counts = np.diff(self._arrays.query_starts.numpy()[: len(batch.rows) + 1])
        tiles = query_tiles(counts)
        self._num_tiles = len(tiles)
        self._tiles.numpy()[: len(tiles)] = tiles
        self._has_decodes = bool((counts == 1).any())

    def pad(self, num_rows: int, page: int) -> None:
        """See `StepArrays.pad`."""
        self._arrays.pad(num_rows, page)

    def fill_padding(self, page: int) -> None:
        """Describes a step of as many decode rows as possible, all of them padding."""
        self._arrays.clear()
        self.pad(len(self._context_lengths), page)

    def send(self) -> None:
        """Sends what was filled to the device."""
        self.block.send(int(self._arrays.num_rows))

    def inputs(self) -> StepInputs:
        """Returns what was filled, as views of the device's side."""
        arrays = self._arrays
        counts = (arrays.num_tokens, arrays.num_rows, arrays.num_logits)
        num_tokens, num_rows, num_logits = (int(count) for count in counts)
        return self._views(num_tokens, num_rows, num_logits, self._num_tiles, self._has_decodes)

    def decode_inputs(self, num_rows: int) -> StepInputs:
        """Returns views of a step of so many decode rows, whatever is filled in."""
        return self._views(num_rows, num_rows, num_rows, 0, True)

    def _views(
        self, num_tokens: int, num_rows: int, num_logits: int, num_tiles: int, has_decodes: bool
    ) -> StepInputs:
        arrays = self._arrays
        # Host facts, for plans that are made on the host: on the CPU.
        seen = num_rows if self.block.device.type == "cpu" else 0
        attention = AttentionPlan(
            cells=self._cells[:num_tokens],
            query_starts=self._query_starts[: num_rows + 1],
            context_lengths=self._context_lengths[:num_rows],
            page_table=self._page_table[:num_rows],
            tiles=self._device_tiles[:num_tiles],
            has_decodes=has_decodes,
            page_size=arrays.page_size,
            host_query_starts=arrays.query_starts.numpy()[: seen + 1].astype(np.int64),
            host_context_lengths=arrays.context_lengths.numpy()[:seen].astype(np.int64),
            host_page_table=arrays.page_table.numpy()[:seen].astype(np.int64),
        )
        return StepInputs(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            logit_rows=self._logit_rows[:num_logits],
            attention=attention,
        )
