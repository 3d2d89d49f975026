"""A step on a CUDA device: inputs at fixed addresses, sent in one copy; decode steps replayed."""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.adapters.layout import ModelLayout, lora_groups
from inference_svc.backends.base import (
    Backend,
    DeviceMemory,
    MemoryNeeds,
    allocate_arena,
    allocate_kv_cache,
    max_pages,
)
from inference_svc.backends.cuda_graphs import CapturedSteps, CudaRecorder, Record, captured_sizes
from inference_svc.backends.cuda_inputs import CudaInputs
from inference_svc.backends.cuda_lora import CudaLora
from inference_svc.backends.torch import step_bytes
from inference_svc.config import EngineConfig
from inference_svc.core import Batch, BatchRow, Request, SamplingParams, Sequence
from inference_svc.model.decoder import Transformer
from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.layers import Linear
from inference_svc.model.weights import load_weights, weights_bytes
from kernels.attention import KVCache

SHORT_TOKENS = 16
"""The length of a short prompt: too few for the kernels of many tokens, and not a single one."""


class PreparedStep(NamedTuple):
    """Which of the tensors at fixed addresses a step uses. `size` is that of the recorded step that
    is replayed for it; None: it is computed operation by operation."""

    num_rows: int
    has_lora: bool
    size: int | None


class CudaBackend:
    """A `Backend` whose inputs lie in `step`. The cache's last page is padding's: no sequence may
    own it.

    `record` records decode steps for replay; None: every step is computed operation by operation.
    """

    def __init__(
        self,
        transformer: Transformer,
        kv_cache: KVCache,
        step: CudaInputs,
        lora: CudaLora,
        max_rows: int,
        record: Record | None,
    ) -> None:
        self.arena = lora.arena
        self.num_pages, self.kv_bytes = kv_cache.num_pages - 1, kv_cache.num_bytes
        self.num_lora_steps = 0
        self.num_replays = 0
        self._transformer = transformer
        self._kv_cache = kv_cache
        self._step = step
        self._lora = lora
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
    def weights_bytes(self) -> int:
        return self._transformer.weights.num_bytes

    @property
    def workspace_bytes(self) -> int:
        """The inputs, and what torch has reserved on the device since the backend was made: it
        reuses what a step has freed, and recorded steps hold what they compute in."""
        device = self._step.block.device
        return self._step.block.num_bytes + _reserved_bytes(device) - self._reserved_bytes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles what steps need, and records decode steps. Writes to nothing but padding's
        page.

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
        """Runs a step of so many tokens, or as many as fit its rows."""
        rows, longest = [], self._step.max_context
        num_rows = min(self._max_rows, -(-num_tokens // longest))
        for start in range(0, num_rows * longest, longest):
            length = min(longest, num_tokens - start)
            sequence = Sequence(Request("warm-up", (0,) * length, SamplingParams()))
            sequence.page_ids = [self._padding_page] * -(-length // self._kv_cache.page_size)
            rows.append(BatchRow(sequence, 0, length, samples=start == 0))
        self.prepare(Batch(tuple(rows)))
        inputs = self._step.inputs()
        # Without tiles, too: in a step with prompts of others an adapter may have single tokens
        # only.
        steps = (self._lora.warm_up_step(len(inputs.token_ids), tiles) for tiles in (True, False))
        for lora in (None, *steps):
            self._transformer.forward(inputs, self._kv_cache, lora)

    def place_threads(self, processors: abc.Sequence[abc.Sequence[int]]) -> None:
        """Leaves the threads to the system: the device computes."""

    def prepare(self, batch: Batch) -> PreparedStep:
        """Sends the step's inputs. Waits for nothing but an earlier step's copy."""
        self._step.block.wait()
        self._step.fill(batch)
        has_lora = self._lora.fill(batch.rows)
        self.num_lora_steps += has_lora
        num_rows, size = len(batch.rows), None
        if self._captured is not None and all(row.is_decode for row in batch.rows):
            size = self._captured.size_for(num_rows)
            if size is not None:
                self._step.pad(size, self._padding_page)
        self._step.send()
        return PreparedStep(num_rows, has_lora, size)

    @torch.inference_mode()
    def forward(self, inputs: PreparedStep) -> Tensor:
        if inputs.size is not None:
            assert self._captured is not None
            self.num_replays += 1
            return self._captured.replay(inputs.size, inputs.has_lora)[: inputs.num_rows]
        lora = self._lora.step() if inputs.has_lora else None
        return self._transformer.forward(self._step.inputs(), self._kv_cache, lora)

    def _decode(self, size: int, with_lora: bool) -> Tensor:
        lora = self._lora.decode_step(size) if with_lora else None
        return self._transformer.forward(self._step.decode_inputs(size), self._kv_cache, lora)

    @property
    def _padding_page(self) -> int:
        return self.num_pages


class CudaFactory:
    """A `BackendFactory` for one CUDA device."""

    has_device_memory = True
    profiler_device = "cuda"

    def supports(self, config: EngineConfig) -> bool:
        return torch.device(config.device).type == "cuda"

    def memory_needs(self, config: EngineConfig, geometry: ModelGeometry) -> MemoryNeeds:
        dtype = getattr(torch, config.dtype)
        return MemoryNeeds(weights_bytes(geometry, dtype), step_bytes(config, geometry))

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        return DeviceMemory(*torch.cuda.mem_get_info(torch.device(config.device)))

    def build(
        self,
        config: EngineConfig,
        geometry: ModelGeometry,
        layout: ModelLayout,
        host_slab: Tensor | None,
    ) -> Backend[PreparedStep]:
        max_tokens, max_rows = config.max_batch_tokens, config.max_sequences
        kv_cache = allocate_kv_cache(config, geometry)
        arena = allocate_arena(config, layout, host_slab)
        dtype = getattr(torch, config.dtype)
        weights = load_weights(config.model_dir, geometry, dtype, config.device, Linear)
        step = CudaInputs(
            max_tokens,
            max_rows,
            max_pages(config),
            config.page_size,
            arena.device,
            reserved_bytes=CudaLora.num_bytes(max_tokens, max_rows),
        )
        lora = CudaLora(arena, lora_groups(layout), step.block, max_tokens, max_rows)
        record = CudaRecorder() if config.cuda_graphs else None
        transformer = Transformer(geometry, weights, is_fused=True)
        backend = CudaBackend(transformer, kv_cache, step, lora, max_rows, record)
        backend.warm_up()
        return backend


def _reserved_bytes(device: torch.device) -> int:
    """Returns what torch has reserved on the device; 0 on a CPU, where tests run this."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
