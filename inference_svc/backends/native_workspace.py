"""The memory that one step of the native decoder computes in."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from inference_svc.model.geometry import ModelGeometry
from kernels.host_memory import allocate_host


@dataclass(frozen=True, slots=True)
class Workspace:
    """Activations of `max_tokens` tokens in the model's dtype, and fp32 logits of `max_logits`."""

    hidden: Tensor
    """[T, hidden_size]: the residual stream."""
    delta: Tensor
    """[T, hidden_size]: what the last block adds to it."""
    normed: Tensor
    """[T, hidden_size]"""
    qkv: Tensor
    """[T, q_size + 2 * kv_size]"""
    mixed: Tensor
    """[T, q_size]: attention's result."""
    gate_up: Tensor
    """[T, 2 * intermediate_size]"""
    gated: Tensor
    """[T, intermediate_size]"""
    last_hidden: Tensor
    """[N, hidden_size]: the residual stream of the rows that sample, from the last layer's
    attention on."""
    last_mixed: Tensor
    """[N, q_size]: the last layer's attention of these rows."""
    logits: Tensor
    """fp32 [N, vocab_size]"""

    @classmethod
    def allocate(
        cls, geometry: ModelGeometry, max_tokens: int, max_logits: int, dtype: torch.dtype
    ) -> Workspace:
        g = geometry

        def buffer(rows: int, columns: int, dtype: torch.dtype = dtype) -> Tensor:
            return allocate_host(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)

        return cls(
            hidden=buffer(max_tokens, g.hidden_size),
            delta=buffer(max_tokens, g.hidden_size),
            normed=buffer(max_tokens, g.hidden_size),
            qkv=buffer(max_tokens, g.q_size + 2 * g.kv_size),
            mixed=buffer(max_tokens, g.q_size),
            gate_up=buffer(max_tokens, 2 * g.intermediate_size),
            gated=buffer(max_tokens, g.intermediate_size),
            last_hidden=buffer(max_logits, g.hidden_size),
            last_mixed=buffer(max_logits, g.q_size),
            logits=buffer(max_logits, g.vocab_size, torch.float32),
        )

    @property
    def num_bytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))
