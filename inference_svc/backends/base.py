"""What the runner asks of a model, whichever way it is computed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from inference_svc.core import Batch


class StepModel(Protocol):
    """Computes one step at a time."""

    @property
    def num_lora_steps(self) -> int:
        """Steps that entered the LoRA path."""

    @property
    def kernels(self) -> str:
        """What computes: "native" and the instruction set; "torch"; "triton", or "triton, captured"
        where decode steps are recorded and replayed."""

    @property
    def workspace_bytes(self) -> int:
        """What it keeps from step to step to compute them in, where it computes."""

    def prepare(self, batch: Batch) -> None:
        """Describes the next step to whoever computes it."""

    def forward(self) -> Tensor:
        """Computes the step: fp32 logits [rows that sample, vocab_size], in the order of the rows.
        The caller may change them, and they may be gone with the next step."""
