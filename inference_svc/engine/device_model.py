"""A step on a device: inputs at fixed addresses, sent in one copy; decode steps replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from inference_svc.adapters.device_lora import DeviceLora
from inference_svc.core import Batch, BatchRow, Request, SamplingParams, Sequence
from inference_svc.engine.captured import CapturedSteps, Record, captured_sizes
from inference_svc.model.device_step import DeviceStep
from inference_svc.model.transformer import Transformer
from kernels.attention import KVCache


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
        self._captured: CapturedSteps | None = None
        if record is not None:
            self._captured = CapturedSteps(captured_sizes(max_rows), self._decode, record)

    @property
    def kernels(self) -> str:
        return "triton" if self._captured is None else "triton, captured"

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles what steps need, and records decode steps, before anybody waits for one. Writes
        to nothing but padding's page."""
        page, size = self._padding_page, self._kv_cache.page_size
        sequence = Sequence(Request("warm-up", (0,) * size, SamplingParams()))
        sequence.page_ids = [page]
        self.prepare(Batch((BatchRow(sequence, 0, size, samples=True),)))
        inputs = self._step.inputs()
        for lora in (None, self._lora.warm_up_step(size)):
            self._transformer.forward(inputs, self._kv_cache, lora)
        if self._captured is not None:
            self._step.block.wait()
            self._step.fill_padding(page)
            self._step.send()
            self._captured.record_all()

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
