"""The decoder in torch: one class computes all supported architectures, which differ in geometry.

It reads a step's inputs, the key-value cache, and a `Lora` if the step has adapters; requests,
pages and adapters are unknown here. What lies between the projections is one kernel each on a
device, and its definition in torch on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.inputs import StepInputs
from inference_svc.model.layers import Linear, RMSNorm, RotaryEmbedding, Rotation
from inference_svc.model.lora import Lora
from inference_svc.model.weights import LayerWeights, ModelWeights
from kernels.attention import KVCache, attend, rotate_and_store
from kernels.elementwise import add_rms_norm, swiglu


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's data that all layers share."""

    inputs: StepInputs
    rotation: Rotation
    kv_cache: KVCache
    lora: Lora | None


class Transformer:
    """Computes steps operation by operation."""

    def __init__(self, geometry: ModelGeometry, weights: ModelWeights[Linear]) -> None:
        self.geometry = geometry
        self.weights = weights
        self._rotary = RotaryEmbedding(geometry.rope, geometry.head_dim, weights.embedding.device)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_cache: KVCache, lora: Lora | None = None) -> Tensor:
        """Computes one step; returns logits [len(inputs.logit_rows), vocab_size] in the model's
        dtype, an inference tensor.

        Writes the step's keys and values to the cells of `inputs.attention`; what each token
        attends to must be in the cache already, or be computed in this step. Without `lora` no
        adapter code runs.
        """
        hidden = F.embedding(inputs.token_ids, self.weights.embedding)
        if lora is not None:
            lora.add_embedding(inputs.token_ids, hidden)
        step = _Step(inputs, self._rotary(inputs.positions, hidden.dtype), kv_cache, lora)
        delta = None  # what the last block adds to the residual stream: the next norm does it
        for index, layer in enumerate(self.weights.layers):
            delta = self._attention(index, layer, _normed(layer.input_norm, hidden, delta), step)
            # Its norm has no name here, or it would be in memory throughout the next attention.
            delta = self._mlp(index, layer, _normed(layer.post_attention_norm, hidden, delta), step)
        return self._logits(hidden, delta, step)

    def _attention(self, index: int, layer: LayerWeights[Linear], x: Tensor, step: _Step) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]."""
        g, attention = self.geometry, step.inputs.attention
        qkv = _project(layer.qkv, x, step.lora, f"layers.{index}.qkv")
        rotate_and_store(
            qkv,
            step.kv_cache,
            index,
            attention.cells,
            step.rotation.cos,
            step.rotation.sin,
            None if layer.q_norm is None else layer.q_norm.weight,
            None if layer.k_norm is None else layer.k_norm.weight,
            g.rms_norm_eps,
        )
        mixed = attend(
            qkv[:, : g.q_size].unflatten(1, (-1, g.head_dim)),
            step.kv_cache,
            index,
            attention,
            scale=g.head_dim**-0.5,
            window=g.sliding_windows[index],
        )
        return _project(layer.o, mixed.flatten(1), step.lora, f"layers.{index}.o")

    def _mlp(self, index: int, layer: LayerWeights[Linear], x: Tensor, step: _Step) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]."""
        gate_up = _project(layer.gate_up, x, step.lora, f"layers.{index}.gate_up")
        return _project(layer.down, swiglu(gate_up), step.lora, f"layers.{index}.down")

    def _logits(self, hidden: Tensor, delta: Tensor | None, step: _Step) -> Tensor:
        """Logits of the rows that sample."""
        normed = _normed(self.weights.norm, hidden, delta, step.inputs.logit_rows)
        logits = self.weights.head(normed)
        if step.lora is not None:
            step.lora.add_head(normed, logits)
        return logits


def _normed(
    norm: RMSNorm, hidden: Tensor, delta: Tensor | None, rows: Tensor | None = None
) -> Tensor:
    return add_rms_norm(hidden, delta, norm.weight, norm.eps, rows)


def _project(linear: Linear, x: Tensor, lora: Lora | None, group: str) -> Tensor:
    out = linear(x)
    if lora is not None:
        lora.add(group, x, out)
    return out
