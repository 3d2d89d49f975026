"""The decoder as a program: every operation of a step, top down, over fixed buffers in C++.

What `Transformer` computes, in the same order and with the same roundings, but in one call: no
Python between operations, no allocation. Programs differ only in which adapters' operations they
hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference_svc.backends.native_buffers import StepArrays
from inference_svc.backends.native_workspace import Workspace
from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.layers import RMSNorm
from inference_svc.model.weights import LayerWeights, ModelWeights
from kernels.attention import KVCache
from kernels.attention.native import NativeAttention, rope_and_store_op, rotary_angles_op
from kernels.attention.native_memory import AttentionScratch, AttentionShape
from kernels.elementwise import gather_op, rms_norm_op, swiglu_op
from kernels.linear import PackedLinear, linear_op
from kernels.native.library import Library, NativeOp, Program

EMBEDDING, HEAD = "embed", "head"

MAX_PROGRAMS = 16
"""Tenants choose what their adapters change, so that there could be any number."""


class AdapterOps(Protocol):
    """Operations that add what the step's adapters change, after the base projection; groups as in
    `model.lora.Lora`. They read a plan that is refilled before each run."""

    def add(self, group: str, x: Tensor, out: Tensor, *, samples_only: bool) -> list[NativeOp]:
        """Rows of `x` and `out` are the tokens of the step, or those that sample only."""

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]: ...


@dataclass(frozen=True, slots=True)
class _Rows:
    """What an operation computes: every token of a step, or only those that sample."""

    hidden: Tensor
    mixed: Tensor
    count: Tensor
    samples_only: bool


class NativeTransformer:
    """`step` holds the inputs and `workspace` the activations of any step."""

    def __init__(
        self,
        geometry: ModelGeometry,
        weights: ModelWeights[PackedLinear],
        kv_cache: KVCache,
        step: StepArrays,
        workspace: Workspace,
        adapters: AdapterOps,
        library: Library,
    ) -> None:
        self._geometry = geometry
        self._weights = weights
        self._kv_cache = kv_cache
        self._step = step
        self._workspace = workspace
        self._adapters = adapters
        self._library = library
        self._angles = self._allocate_angles()
        self._scratch = AttentionScratch(AttentionShape.of(kv_cache, geometry.num_heads))
        self._attention = {
            window: NativeAttention(kv_cache, step.rows, self._scratch, window)
            for window in dict.fromkeys(geometry.sliding_windows)
        }
        self._ops = tuple(self._all_ops())
        self._every_group = frozenset(group for group, _ in self._ops if group)
        always_there = (frozenset[str](), self._every_group)
        self._programs = {groups: self._build(groups) for groups in always_there}

    def forward(self, groups: frozenset[str] = frozenset()) -> Tensor:
        """Runs the step that `step` describes, with adapters in `groups` only. Returns fp32 logits
        [num_logits, vocab_size], overwritten by the next run."""
        self._program(groups).run()
        return self._workspace.logits[: int(self._step.num_logits)]

    def _program(self, groups: frozenset[str]) -> Program:
        """The program of `groups`, or that of all where too many others were asked for: what no
        adapter of the step changes costs it a look at their ranks."""
        if groups not in self._programs:
            if len(self._programs) >= MAX_PROGRAMS:
                return self._programs[self._every_group]
            self._programs[groups] = self._build(groups)
        return self._programs[groups]

    def _build(self, groups: frozenset[str]) -> Program:
        return self._library.program(
            [op for group, op in self._ops if not group or group in groups]
        )

    @property
    def num_bytes(self) -> int:
        """Of the memory that steps are computed in."""
        angles = sum(tensor.nbytes for tensor in self._angles)
        attention = sum(attention.num_bytes for attention in self._attention.values())
        return self._workspace.num_bytes + angles + self._scratch.num_bytes + attention

    def _all_ops(self) -> Iterator[tuple[str, NativeOp]]:
        """Each operation, with the group of adapters that it belongs to ("": always runs)."""
        step, work, weights = self._step, self._workspace, self._weights
        yield "", gather_op(weights.embedding, work.hidden, step.token_ids, step.num_tokens)
        yield from _of(EMBEDDING, self._adapters.add_embedding(step.token_ids, work.hidden))
        yield "", self._angles_op()
        for attention in self._attention.values():
            yield "", attention.items_op()
        delta = None
        rows = _Rows(work.hidden, work.mixed, step.num_tokens, samples_only=False)
        for index, layer in enumerate(weights.layers):
            yield from self._attention_ops(index, layer, rows, delta)
            if index == len(weights.layers) - 1:
                rows = _Rows(work.last_hidden, work.last_mixed, step.num_logits, samples_only=True)
                yield "", gather_op(work.hidden, rows.hidden, step.logit_rows, rows.count)
                yield "", gather_op(work.mixed, rows.mixed, step.logit_rows, rows.count)
            yield from self._project(f"layers.{index}.o", rows.mixed, layer.o, work.delta, rows)
            delta = work.delta
            yield from self._mlp_ops(index, layer, rows)
        yield "", self._norm_op(weights.norm, rows, delta)
        yield from self._project(HEAD, work.normed, weights.head, work.logits, rows)

    def _attention_ops(
        self, index: int, layer: LayerWeights[PackedLinear], rows: _Rows, delta: Tensor | None
    ) -> Iterator[tuple[str, NativeOp]]:
        work = self._workspace
        yield "", self._norm_op(layer.input_norm, rows, delta)
        yield from self._project(f"layers.{index}.qkv", work.normed, layer.qkv, work.qkv, rows)
        yield "", self._rope_and_store_op(index, layer)
        attention = self._attention[self._geometry.sliding_windows[index]]
        scale = self._geometry.head_dim**-0.5
        yield "", attention.attend_op(work.qkv, rows.mixed, index, scale=scale)

    def _allocate_angles(self) -> tuple[Tensor, Tensor]:
        shape = (len(self._step.positions), self._geometry.head_dim // 2)
        dtype = self._workspace.hidden.dtype
        return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def _angles_op(self) -> NativeOp:
        rope, (cos, sin) = self._geometry.rope, self._angles
        frequencies = rope.inverse_frequencies(self._geometry.head_dim)
        step = self._step
        return rotary_angles_op(
            step.positions,
            frequencies,
            cos,
            sin,
            step.num_tokens,
            scaling=rope.attention_scaling,
        )

    def _rope_and_store_op(self, index: int, layer: LayerWeights[PackedLinear]) -> NativeOp:
        cos, sin = self._angles
        q_norm, k_norm = layer.q_norm, layer.k_norm
        return rope_and_store_op(
            self._workspace.qkv,
            self._kv_cache,
            index,
            cos,
            sin,
            self._step.rows,
            num_heads=self._geometry.num_heads,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
        )

    def _mlp_ops(
        self, index: int, layer: LayerWeights[PackedLinear], rows: _Rows
    ) -> Iterator[tuple[str, NativeOp]]:
        work, name = self._workspace, f"layers.{index}"
        yield "", self._norm_op(layer.post_attention_norm, rows, work.delta)
        yield from self._project(f"{name}.gate_up", work.normed, layer.gate_up, work.gate_up, rows)
        yield "", swiglu_op(work.gate_up, work.gated, rows.count)
        yield from self._project(f"{name}.down", work.gated, layer.down, work.delta, rows)

    def _norm_op(self, norm: RMSNorm, rows: _Rows, delta: Tensor | None) -> NativeOp:
        """Adds `delta` to the residual stream, and norms that."""
        normed = self._workspace.normed
        return rms_norm_op(rows.hidden, delta, norm.weight, normed, rows.count, eps=norm.eps)

    def _project(
        self, group: str, x: Tensor, weights: PackedLinear, out: Tensor, rows: _Rows
    ) -> Iterator[tuple[str, NativeOp]]:
        yield "", linear_op(x, weights, out, rows.count)
        yield from _of(group, self._adapters.add(group, x, out, samples_only=rows.samples_only))


def _of(group: str, ops: Iterable[NativeOp]) -> Iterator[tuple[str, NativeOp]]:
    return ((group, op) for op in ops)
