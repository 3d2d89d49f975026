"""A step computed by one program of native operations."""

from __future__ import annotations

from torch import Tensor

from inference_svc.backends.native import NativeTransformer
from inference_svc.backends.native_buffers import StepArrays
from inference_svc.backends.native_lora import NativeLoraOps
from inference_svc.core import Batch


class NativeModel:
    """See `StepModel`."""

    def __init__(
        self, transformer: NativeTransformer, step: StepArrays, lora: NativeLoraOps, variant: str
    ) -> None:
        self._transformer = transformer
        self._step = step
        self._lora = lora
        self.kernels = f"native {variant}"
        self._groups: frozenset[str] = frozenset()
        self.num_lora_steps = 0

    @property
    def workspace_bytes(self) -> int:
        """See `StepModel`."""
        return self._transformer.num_bytes + self._lora.workspace_bytes

    def prepare(self, batch: Batch) -> None:
        self._step.fill(batch)
        self._groups = self._lora.plan(batch.rows)
        self.num_lora_steps += bool(self._groups)

    def forward(self) -> Tensor:
        return self._transformer.forward(self._groups)
