"""A step on a device: inputs at fixed addresses, sent in one copy; decode steps replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from inference_svc.backends.cuda_graphs import CapturedSteps, Record, captured_sizes
from inference_svc.backends.cuda_inputs import DeviceStep
from inference_svc.backends.cuda_lora import DeviceLora
from inference_svc.core import Batch, BatchRow, Request, SamplingParams, Sequence
from inference_svc.model.decoder import Transformer
from kernels.attention import KVCache

SHORT_TOKENS = 16
"""Of a short prompt: too few for the kernels of many tokens, and not a single one."""


class DeviceModel:
    """See `StepModel`. The cache's last page is padding's: no sequence may own it.

    `record` records decode steps for replay; None: every step is computed operation by operation.
    """

    def __init__(
        self,
        transformer: Transformer,
        kv_cache: KVCache,
        step: DeviceStep,
        lora: DeviceLora,
        max_rows: int,
        record: Record | None,
    ) -> None:
        self._transformer = transformer
        self._kv_cache = kv_cache
        self._step = step
        self._lora = lora
        self._has_lora = False
        self._num_rows = 0
        self._size: int | None = None
        self.num_lora_steps = 0
        self.num_replays = 0
        self._max_rows = max_rows
        self._sizes = captured_sizes(max_rows)
        self._captured: CapturedSteps | None = None
        self._reserved_bytes = _reserved_bytes(step.block.device)
        if record is not None:
            self._captured = CapturedSteps(self._sizes, self._decode, record)

    @property
    def kernels(self) -> str:
        return "triton" if self._captured is None else "triton, captured"

    @property
    def workspace_bytes(self) -> int:
        """The inputs, and what torch has taken of a CUDA device since: it keeps what a step has
        freed for the next, and replayed steps hold what they compute in."""
        device = self._step.block.device
        return self._step.block.num_bytes + _reserved_bytes(device) - self._reserved_bytes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles what steps need, and records decode steps, before anybody waits for one. Writes
        to nothing but padding's page.

        Kernels differ between few tokens and many, between tiles and single tokens, and in how many
        shares a context is cut into for so many decode rows: the sizes to record have all of them.
        """
        for num_tokens in sorted({min(SHORT_TOKENS, self._step.max_tokens), self._step.max_tokens}):
            self._warm_up_prompts(num_tokens)
        self._step.block.wait()
        self._step.fill_padding(self._padding_page)
        self._step.send()
        if self._captured is not None:
            self._captured.record_all()
            return
        for size in reversed(self._sizes):
            for with_lora in (True, False):
                self._decode(size, with_lora)

    def _warm_up_prompts(self, num_tokens: int) -> None:
        """A step of so many tokens, or as many as fit its rows."""
        rows, longest = [], self._step.max_context
        num_rows = min(self._max_rows, -(-num_tokens // longest))
        for start in range(0, num_rows * longest, longest):
            length = min(longest, num_tokens - start)
            sequence = Sequence(Request("warm-up", (0,) * length, SamplingParams()))
            sequence.page_ids = [self._padding_page] * -(-length // self._kv_cache.page_size)
            rows.append(BatchRow(sequence, 0, length, samples=start == 0))
        self.prepare(Batch(tuple(rows)))
        inputs = self._step.inputs()
        # Without tiles, too: beside others' prompts an adapter may have single tokens only.
        steps = (self._lora.warm_up_step(len(inputs.token_ids), tiles) for tiles in (True, False))
        for lora in (None, *steps):
            self._transformer.forward(inputs, self._kv_cache, lora)

    def prepare(self, batch: Batch) -> None:
        """Describes the step and sends it. Waits for nothing but an earlier step's copy."""
        self._step.block.wait()
        self._step.fill(batch)
        self._has_lora = self._lora.fill(batch.rows)
        self.num_lora_steps += self._has_lora
        self._num_rows = len(batch.rows)
        self._size = None
        if self._captured is not None and all(row.is_decode for row in batch.rows):
            self._size = self._captured.size_for(self._num_rows)
            if self._size is not None:
                self._step.pad(self._size, self._padding_page)
        self._step.send()

    @torch.inference_mode()
    def forward(self) -> Tensor:
        if self._captured is not None and self._size is not None:
            self.num_replays += 1
            return self._captured.replay(self._size, self._has_lora)[: self._num_rows]
        lora = self._lora.step() if self._has_lora else None
        return self._transformer.forward(self._step.inputs(), self._kv_cache, lora)

    def _decode(self, size: int, with_lora: bool) -> Tensor:
        lora = self._lora.decode_step(size) if with_lora else None
        return self._transformer.forward(self._step.decode_inputs(size), self._kv_cache, lora)

    @property
    def _padding_page(self) -> int:
        return self._kv_cache.num_pages - 1


def _reserved_bytes(device: torch.device) -> int:
    """What torch has of it, in use or kept for later; nothing is known of a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
