"""A step computed operation by operation in torch (and Triton, on CUDA)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from inference_svc.adapters.arena import Arena
from inference_svc.backends.torch_lora import LoraStep, make_lora_step
from inference_svc.core import Batch
from inference_svc.model.decoder import Transformer
from inference_svc.model.inputs import StepInputs
from kernels.attention import KVCache
from kernels.lora import LoraGroup


class TorchModel:
    """See `StepModel`. Owns nothing but references: the model, its KV cache, the arena."""

    kernels = "torch"
    workspace_bytes = 0
    """Each step allocates what it computes in, and frees it."""

    def __init__(
        self,
        transformer: Transformer,
        kv_cache: KVCache,
        arena: Arena,
        groups: Mapping[str, LoraGroup],
    ) -> None:
        self._transformer = transformer
        self._kv_cache = kv_cache
        self._arena = arena
        self._groups = groups
        self._inputs: StepInputs | None = None
        self._lora: LoraStep | None = None
        self.num_lora_steps = 0

    def prepare(self, batch: Batch) -> None:
        self._inputs = StepInputs.build(batch, self._kv_cache.page_size, self._arena.device)
        self._lora = make_lora_step(batch.rows, self._arena, self._groups)
        self.num_lora_steps += self._lora is not None

    def forward(self) -> Tensor:
        assert self._inputs is not None, "a step is prepared first"
        return self._transformer.forward(self._inputs, self._kv_cache, self._lora)
