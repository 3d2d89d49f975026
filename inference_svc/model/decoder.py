"""The decoder in torch: one class computes all supported architectures, which differ in geometry.

It reads a step's inputs, the key-value cache, and a `Lora` if the step has adapters; requests,
pages and adapters are unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.inputs import StepInputs
from inference_svc.model.layers import Linear, RotaryEmbedding, Rotation, swiglu
from inference_svc.model.lora import Lora
from inference_svc.model.weights import LayerWeights, ModelWeights
from kernels.attention import KVCache, attend, rotate_and_store


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's data that all layers share."""

    inputs: StepInputs
    rotation: Rotation
    kv_cache: KVCache
    lora: Lora | None


class Transformer:
    """Computes steps operation by operation. `is_fused`: one kernel of the device rotates queries
    and keys and writes keys and values to their cells."""

    def __init__(
        self, geometry: ModelGeometry, weights: ModelWeights[Linear], *, is_fused: bool = False
    ) -> None:
        self.geometry = geometry
        self.weights = weights
        self._is_fused = is_fused
        self._rotary = RotaryEmbedding(geometry.rope, geometry.head_dim, weights.embedding.device)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_cache: KVCache, lora: Lora | None = None) -> Tensor:
        """Computes one step; returns fp32 logits [len(inputs.logit_rows), vocab_size], an inference
        tensor.

        Writes the step's keys and values to the cells of `inputs.attention`; what each token
        attends to must be in the cache already, or be computed in this step. Without `lora` no
        adapter code runs.
        """
        hidden = F.embedding(inputs.token_ids, self.weights.embedding)
        if lora is not None:
            lora.add_embedding(inputs.token_ids, hidden)
        step = _Step(inputs, self._rotary(inputs.positions, hidden.dtype), kv_cache, lora)
        for index, layer in enumerate(self.weights.layers):
            hidden += self._attention(index, layer, layer.input_norm(hidden), step)
            hidden += self._mlp(index, layer, layer.post_attention_norm(hidden), step)
        return self._logits(hidden.index_select(0, inputs.logit_rows), lora)

    def _attention(self, index: int, layer: LayerWeights[Linear], x: Tensor, step: _Step) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]."""
        g = self.geometry
        qkv = _project(layer.qkv, x, step.lora, f"layers.{index}.qkv")
        mixed = attend(
            self._rotate_and_store(index, layer, qkv, step),
            step.kv_cache,
            index,
            step.inputs.attention,
            scale=g.head_dim**-0.5,
            window=g.sliding_windows[index],
        )
        return _project(layer.o, mixed.flatten(1), step.lora, f"layers.{index}.o")

    def _rotate_and_store(
        self, index: int, layer: LayerWeights[Linear], qkv: Tensor, step: _Step
    ) -> Tensor:
        """Returns q [T, num_heads, head_dim], normed and rotated; writes k and v to their cells."""
        g, cells = self.geometry, step.inputs.attention.cells
        if self._is_fused:
            rotate_and_store(
                qkv,
                step.kv_cache,
                index,
                cells,
                step.rotation.cos,
                step.rotation.sin,
                None if layer.q_norm is None else layer.q_norm.weight,
                None if layer.k_norm is None else layer.k_norm.weight,
                g.rms_norm_eps,
            )
            return qkv[:, : g.q_size].unflatten(1, (-1, g.head_dim))
        heads = qkv[:, : g.q_size + g.kv_size].unflatten(1, (-1, g.head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = heads.split((g.num_heads, g.num_kv_heads), dim=1)
            heads = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        q, k = step.rotation(heads).split((g.num_heads, g.num_kv_heads), dim=1)
        # The rotated keys return next to the values, the form that the cache takes.
        qkv[:, g.q_size : g.q_size + g.kv_size].view(k.shape).copy_(k)
        step.kv_cache.write(index, cells, qkv[:, g.q_size :])
        return q

    def _mlp(self, index: int, layer: LayerWeights[Linear], x: Tensor, step: _Step) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]."""
        gate_up = _project(layer.gate_up, x, step.lora, f"layers.{index}.gate_up")
        return _project(layer.down, swiglu(gate_up), step.lora, f"layers.{index}.down")

    def _logits(self, hidden: Tensor, lora: Lora | None) -> Tensor:
        """hidden: [N, hidden_size] of the rows that sample -> fp32 [N, vocab_size]."""
        normed = self.weights.norm(hidden)
        logits = self.weights.head(normed)
        if lora is not None:
            lora.add_head(normed, logits)
        return logits.float()


def _project(linear: Linear, x: Tensor, lora: Lora | None, group: str) -> Tensor:
    out = linear(x)
    if lora is not None:
        lora.add(group, x, out)
    return out
