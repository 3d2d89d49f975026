"""One step's inputs at fixed addresses on the device: filled on the host, sent in one copy, and
one more for each long run of new pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.backends.cuda.padded_sizes import StepShape, most_prompt_tokens
from inference_svc.backends.cuda.pages import MAX_ROW_UPDATES, PageTable, PageUpdates
from inference_svc.backends.native.buffers import StepArrays
from inference_svc.backends.step_data import StepData
from inference_svc.core import BatchColumns
from inference_svc.model.description import Pictures
from inference_svc.model.inputs import MaskedRows, PlacedRows, StepInputs
from inference_svc.pictures.positions import NUM_AXES
from kernels.attention import AttentionPlan
from kernels.attention.plan import TILE_QUERIES, query_tiles, segment_starts
from kernels.streams import Stream

ALIGNMENT_BYTES = 256
NUM_TENSORS = 19
"""At least the number of tensors in a block."""


class StepBlock:
    """`num_bytes` of host memory and their twin on `device`, both at fixed addresses.

    `send` does not wait, and `stream` copies later: the host may write again once `wait` has
    returned.
    """

    def __init__(self, num_bytes: int, device: torch.device, stream: Stream) -> None:
        self.device = device
        pin_memory = device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._twin = self._host.to(device, copy=True)
        self._used_bytes = 0
        self._stream = stream
        self._sent = stream.event()

    @property
    def num_bytes(self) -> int:
        """The size of each side."""
        return len(self._host)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocates a tensor of this shape and dtype in the host side."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used_bytes
        assert start + num_bytes <= len(self._host), "the block is too small"
        self._used_bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._host[start : start + num_bytes].view(dtype).view(shape)

    def on_device(self, tensor: Tensor) -> Tensor:
        """Returns the device's twin, of the same shape and dtype, of `tensor`, which lies in this
        block's host side."""
        start = tensor.data_ptr() - self._host.data_ptr()
        assert 0 <= start <= len(self._host) - tensor.nbytes, "not of this block"
        return self._twin[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def send(self) -> None:
        """Copies everything, in one piece."""
        self._stream.copy([(self._twin, self._host)])
        self._sent.record()

    def wait(self) -> None:
        """Waits until the inputs sent last have been read: rarely, as a step ends with its
        tokens."""
        self._sent.synchronize()


class CudaInputs:
    """Steps of up to `max_tokens` tokens of up to `max_rows` sequences, whose pages lie in `table`.

    `reserved_bytes` of `block` are left for other tensors that change with every step. `pictures`
    are the model's, whose tokens may have several positions, and see each other.
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        table: PageTable,
        page_size: int,
        reserved_bytes: int,
        pictures: Pictures | None = None,
    ) -> None:
        max_tiles = _max_tiles(max_tokens, max_rows)
        num_bytes = self.num_bytes(max_tokens, max_rows, pictures) + reserved_bytes
        self.block = block = StepBlock(num_bytes, table.on_device.device, table.stream)
        self._pages = pages = _StepPages(table, block, max_rows)
        self._arrays = arrays = StepArrays(
            max_tokens,
            max_rows,
            page_size,
            pages,
            block.zeros,
            places=None if pictures is None else pictures.positions,
            has_ends=pictures is not None and pictures.are_mutual,
        )
        self._tiles = block.zeros(max_tiles, 2, dtype=torch.int32)
        segments = block.zeros(max_rows + 1, dtype=torch.int32)
        self._segment_array = segments.numpy()
        self._context_array = arrays.context_lengths.numpy()
        twin = block.on_device
        positions = arrays.positions if arrays.axis_positions is None else arrays.axis_positions
        self._token_ids, self._positions = twin(arrays.token_ids), twin(positions)
        self._ends = None if arrays.ends is None else twin(arrays.ends)
        self._cells, self._logit_rows = twin(arrays.cells), twin(arrays.logit_rows)
        self._query_starts = twin(arrays.query_starts)
        self._context_lengths = twin(arrays.context_lengths)
        self._device_tiles, self._device_segments = twin(self._tiles), twin(segments)
        self._num_tiles = 0
        self._has_decodes = False

    @staticmethod
    def num_bytes(max_tokens: int, max_rows: int, pictures: Pictures | None = None) -> int:
        """Returns its bytes in the block, at most."""
        max_tiles, max_updates = _max_tiles(max_tokens, max_rows), MAX_ROW_UPDATES * max_rows
        num_bytes = 24 * max_tokens + 24 * (max_rows + 1) + 8 * max_tiles + 12 * max_updates + 12
        if pictures is not None:
            of_token = 8 * NUM_AXES * (pictures.axes is not None) + 4 * pictures.are_mutual
            num_bytes += of_token * max_tokens + 2 * ALIGNMENT_BYTES
        return num_bytes + NUM_TENSORS * ALIGNMENT_BYTES

    def fill(self, batch: BatchColumns, mutual: Sequence[tuple[int, int]] = ()) -> None:
        """Describes `batch` on the host. `mutual` are as in `AttentionPlan.build`."""
        self._arrays.fill(batch)
        self._arrays.let_see(mutual)
        self._fill_tiles(batch.counts)

    def fill_rows(self, data: StepData, mutual: Sequence[tuple[int, int]]) -> None:
        """Does the same for the rows of another rank's step."""
        self._arrays.fill_rows(data.token_ids, data.starts, data.counts, data.page_ids)
        self._arrays.fill_axes(data.axes)
        self._arrays.let_see(mutual)
        self._fill_tiles(data.counts)

    def _fill_tiles(self, row_counts: Sequence[int]) -> None:
        num_rows, counts = len(row_counts), None
        self._num_tiles, self._has_decodes = 0, True
        if self._arrays.size.tokens > num_rows:
            counts = np.array(row_counts)
            tiles = query_tiles(counts)
            self._num_tiles = len(tiles)
            self._tiles.numpy()[: len(tiles)] = tiles
            self._has_decodes = bool((counts == 1).any())
        contexts = self._context_array[:num_rows]
        self._segment_array[: num_rows + 1] = segment_starts(counts, contexts)

    def pad(self, shape: StepShape) -> None:
        """Adds padding up to `shape`, which reads and writes nothing but padding's page: decode
        rows, or beside prompts a row of its own behind all others."""
        if shape.has_prompts:
            self._pad_prompts(shape.num_tokens, shape.num_rows)
        else:
            self._pad_decodes(shape.num_rows)

    def _pad_decodes(self, num_rows: int) -> None:
        used, segments = self._arrays.size.rows, self._segment_array
        if used < num_rows:
            segments[used + 1 : num_rows + 1] = segments[used] + np.arange(1, num_rows - used + 1)
        self._pages.pad(used, num_rows)
        self._arrays.pad(num_rows, self._pages.table.padding_page)

    def _pad_prompts(self, num_tokens: int, num_rows: int) -> None:
        tokens, rows, _ = self._arrays.size
        self._segment_array[rows + 1 : num_rows + 2] = self._segment_array[rows]
        self._pages.pad(rows, num_rows + 1)
        self._arrays.pad_prompts(num_tokens, num_rows, self._pages.table.padding_page)
        firsts = np.arange(0, num_tokens - tokens, TILE_QUERIES)
        used, end = self._num_tiles, self._num_tiles + len(firsts)
        tiles = self._tiles.numpy()
        tiles[used:end, 0], tiles[used:end, 1] = num_rows, firsts
        # The other tiles begin behind the last query of any row.
        tiles[end : _max_tiles(num_tokens, num_rows)] = 0, num_tokens

    def fill_padding(self, shape: StepShape) -> None:
        """Describes a step of decode rows that are nothing but padding."""
        assert not shape.has_prompts, "a row of padding has no more tokens than a sequence"
        self._arrays.clear()
        self._segment_array[0] = self._num_tiles = 0
        self._pages.fill([])
        self.pad(shape)

    def send(self) -> None:
        """Sends the filled inputs to the device."""
        self._pages.send()
        self.block.send()

    def write_pages(self) -> None:
        """Writes the step's new pages to the table: on the device, before all else."""
        self._pages.write()

    def inputs(self) -> StepInputs:
        """Returns the filled inputs, as views of the device's side."""
        return self.views(*self._arrays.size, self._num_tiles, self._has_decodes)

    def padded_inputs(self, shape: StepShape) -> StepInputs:
        """Returns views of a step that is padded to this shape, with any contents."""
        _, num_tokens, num_rows, has_prompts = shape
        if not has_prompts:
            return self.views(num_tokens, num_rows, num_rows, 0, True)
        num_tiles = _max_tiles(num_tokens, num_rows)
        return self.views(num_tokens, num_rows + 1, num_rows, num_tiles, True)

    def views(
        self, num_tokens: int, num_rows: int, num_logits: int, num_tiles: int, has_decodes: bool
    ) -> StepInputs:
        """Returns views of a step of these sizes, with any contents."""
        arrays = self._arrays
        # Host facts, for plans that are made on the host: on the CPU.
        seen = num_rows if self.block.device.type == "cpu" else 0
        attention = AttentionPlan(
            cells=self._cells[:num_tokens],
            query_starts=self._query_starts[: num_rows + 1],
            context_lengths=self._context_lengths[:num_rows],
            table_rows=self._pages.device_rows[:num_rows],
            page_table=self._pages.table.on_device,
            tiles=self._device_tiles[:num_tiles],
            segment_starts=self._device_segments[: num_rows + 1],
            has_decodes=has_decodes,
            page_size=arrays.page_size,
            host_query_starts=arrays.query_starts.numpy()[: seen + 1].astype(np.int64),
            host_context_lengths=arrays.context_lengths.numpy()[:seen].astype(np.int64),
            host_page_table=self._pages.host_pages(seen),
            ends=None if self._ends is None else self._ends[:num_tokens],
        )
        return StepInputs(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[..., :num_tokens],
            logit_rows=self._logit_rows[:num_logits],
            attention=attention,
        )


def _max_tiles(num_tokens: int, num_rows: int) -> int:
    """Returns the most tiles of so many rows with several queries, and of a row for padding."""
    return num_tokens // TILE_QUERIES + min(num_rows, num_tokens // 2) + 1


class CudaPictures:
    """The embeddings of pictures of recorded steps, which have up to `most_prompt_tokens` of
    `max_tokens`, and a mask in `block` of the tokens that have any. Other steps read embeddings
    where they are."""

    def __init__(
        self,
        block: StepBlock,
        max_tokens: int,
        pictures: Pictures,
        dtype: torch.dtype,
        stream: Stream,
    ) -> None:
        most, self._stream = most_prompt_tokens(max_tokens), stream
        mask = block.zeros(most, 1, dtype=torch.bool)
        rows = torch.zeros(most, pictures.row_size, dtype=dtype, device=block.device)
        self._mask, self._num_used = mask.numpy(), 0
        self._on_device = MaskedRows(block.on_device(mask), rows)

    @staticmethod
    def mask_bytes(max_tokens: int) -> int:
        """Returns its bytes in the block."""
        return most_prompt_tokens(max_tokens) + ALIGNMENT_BYTES

    @staticmethod
    def rows_bytes(max_tokens: int, pictures: Pictures, dtype: torch.dtype) -> int:
        """Returns the bytes of the embeddings."""
        return most_prompt_tokens(max_tokens) * pictures.row_size * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The memory of the embeddings."""
        return self._on_device.rows.nbytes

    def fill(self, placed: Sequence[PlacedRows]) -> None:
        """Notes a recorded step's embeddings, and copies them on the device."""
        self._mask[: self._num_used] = False
        for start, rows in placed:
            self._mask[start : start + len(rows)] = True
        self._num_used = max((start + len(rows) for start, rows in placed), default=0)
        fixed = self._on_device.rows
        self._stream.copy((fixed[start : start + len(rows)], rows) for start, rows in placed)

    def of_step(self, num_tokens: int) -> MaskedRows:
        """Returns views of a step of so many tokens, with any contents."""
        return MaskedRows(*(each[:num_tokens] for each in self._on_device))


class _StepPages:
    """`PageRows` of one step: which rows of `table` its sequences have, and their new cells."""

    def __init__(self, table: PageTable, block: StepBlock, max_rows: int) -> None:
        self.table = table
        rows = block.zeros(max_rows, dtype=torch.int32)
        max_updates = MAX_ROW_UPDATES * max_rows
        cells = block.zeros(max_updates, dtype=torch.int64)
        pages = block.zeros(max_updates, dtype=torch.int32)
        self._updates = PageUpdates(cells, pages, table.spare_cell)
        self._rows = rows.numpy()
        self.device_rows = block.on_device(rows)
        self._device_cells, self._device_pages = block.on_device(cells), block.on_device(pages)

    @property
    def host_table(self) -> Tensor:
        return self.table.on_host

    def fill(self, pages: list[list[int]]) -> NDArray[np.int64]:
        rows = self.table.fill(pages, self._updates)
        self._rows[: len(rows)] = rows
        return rows

    def pad(self, first: int, end: int) -> None:
        self._rows[first:end] = self.table.padding_row

    def send(self) -> None:
        self.table.send()

    def write(self) -> None:
        self.table.apply(self._device_cells, self._device_pages)

    def host_pages(self, num_rows: int) -> NDArray[np.int64]:
        """The pages of the first rows of the step, in their order."""
        return self.table.on_host.numpy()[self._rows[:num_rows]].astype(np.int64)
