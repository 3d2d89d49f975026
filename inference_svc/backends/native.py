"""A step computed by one program in C++: the decoder's operations, top down, over fixed buffers.

What `Transformer` computes, in the same order and with the same roundings, but in one call: no
Python between operations, no allocation. Programs differ only in which adapters' operations they
hold.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.layout import EMBEDDING, HEAD, ModelLayout, lora_groups
from inference_svc.backends.base import (
    Backend,
    DeviceMemory,
    Logits,
    MemoryNeeds,
    allocate_arena,
    allocate_kv_cache,
    max_pages,
)
from inference_svc.backends.native_buffers import BatchPages, StepArrays, Workspace
from inference_svc.backends.native_lora import NativeLoraOps
from inference_svc.backends.torch import most_targets, step_bytes
from inference_svc.core import Batch, EngineConfig
from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.layers import RMSNorm
from inference_svc.model.weights import (
    LayerWeights,
    ModelWeights,
    largest_projection_bytes,
    load_weights,
    weights_bytes,
)
from kernels.attention import KVCache, can_tile
from kernels.attention.native import NativeAttention, rope_and_store_op, rotary_angles_op
from kernels.attention.native_memory import AttentionScratch, AttentionShape
from kernels.elementwise import gather_op, rms_norm_op, swiglu_op
from kernels.host_memory import Slab
from kernels.linear import PackedLinear, linear_op
from kernels.native.library import Library, NativeOp, Program, load

logger = logging.getLogger(__name__)

MAX_PROGRAMS = 16
"""Tenants choose what their adapters change, so that the number must be limited."""


class AdapterOps(Protocol):
    """Operations that add what the step's adapters change, after the base projection; groups as in
    `model.lora.Lora`. They read a plan that is refilled before each run."""

    def add(self, group: str, x: Tensor, out: Tensor, *, samples_only: bool) -> list[NativeOp]:
        """Rows of `x` and `out` are the tokens of the step, or those that sample only."""

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]: ...


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that an operation computes: every token of a step, or only those that sample."""

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
        """Returns the program of `groups`, or that of all groups if there are too many programs:
        then groups that no adapter changes cost the step a check of their ranks."""
        groups = self._computed(groups)
        if groups not in self._programs:
            self._programs[groups] = self._build(groups)
        return self._programs[groups]

    def _computed(self, groups: frozenset[str]) -> frozenset[str]:
        is_full = groups not in self._programs and len(self._programs) >= MAX_PROGRAMS
        return self._every_group if is_full else groups

    def num_ops(self, groups: frozenset[str]) -> Counter[str]:
        """Counts the operations, by group, of the program that computes adapters in `groups`."""
        computed = self._computed(groups)
        return Counter(group for group, _ in self._ops if group in computed)

    def _build(self, groups: frozenset[str]) -> Program:
        return self._library.program(
            [op for group, op in self._ops if not group or group in groups]
        )

    @property
    def weights_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def num_bytes(self) -> int:
        """The memory that steps are computed in."""
        angles = sum(tensor.nbytes for tensor in self._angles)
        attention = sum(attention.num_bytes for attention in self._attention.values())
        return self._workspace.num_bytes + angles + self._scratch.num_bytes + attention

    def _all_ops(self) -> Iterator[tuple[str, NativeOp]]:
        """Yields each operation with the group of adapters that it is part of ("": always runs)."""
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


class NativeBackend:
    """A `Backend` whose inputs lie in `step`; a prepared step is the groups that its adapters
    change, which select the program."""

    def __init__(
        self,
        transformer: NativeTransformer,
        kv_cache: KVCache,
        arena: Arena,
        step: StepArrays,
        lora: NativeLoraOps,
        library: Library,
    ) -> None:
        self.arena = arena
        self.num_pages, self.kv_bytes = kv_cache.num_pages, kv_cache.num_bytes
        self.kernels = f"native {library.variant}"
        self.num_lora_steps = 0
        self._transformer = transformer
        self._step = step
        self._lora = lora
        self._library = library

    @property
    def weights_bytes(self) -> int:
        return self._transformer.weights_bytes

    @property
    def workspace_bytes(self) -> int:
        return self._transformer.num_bytes + self._lora.workspace_bytes

    def lora_launches(self, targets: Collection[int]) -> Mapping[str, int]:
        return self._transformer.num_ops(self._lora.groups_of(targets))

    def place_threads(self, processors: Sequence[Sequence[int]]) -> None:
        self._library.place_threads(processors)

    def prepare(self, batch: Batch) -> frozenset[str]:
        self._step.fill(batch.columns())
        groups = self._lora.plan(batch.rows)
        self.num_lora_steps += bool(groups)
        return groups

    def forward(self, inputs: frozenset[str]) -> Logits:
        return Logits(self._transformer.forward(inputs))

    def free_unused(self) -> None:
        """Holds only what every step needs."""


class NativeFactory:
    """A `BackendFactory` for CPUs that the native kernels are compiled for."""

    has_device_memory = False
    profiler_device = None

    def supports(self, config: EngineConfig) -> bool:
        if not config.native_kernels or torch.device(config.device).type != "cpu":
            return False
        if config.dtype not in ("float32", "bfloat16"):
            logger.warning(
                "the native kernels do not compute %s: the torch path serves", config.dtype
            )
            return False
        return load() is not None

    def memory_needs(self, config: EngineConfig, geometry: ModelGeometry) -> MemoryNeeds:
        dtype = getattr(torch, config.dtype)
        needed_bytes = weights_bytes(geometry, dtype)
        if geometry.tie_word_embeddings:  # packed, the head cannot share the embedding's memory
            needed_bytes += geometry.vocab_size * geometry.hidden_size * dtype.itemsize
        workspace = step_bytes(config, geometry) + _native_bytes(config, geometry)
        # While a projection is packed, the tensor of its file is in memory as well.
        return MemoryNeeds(needed_bytes, workspace, largest_projection_bytes(geometry, dtype))

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        return None

    def build(
        self,
        config: EngineConfig,
        geometry: ModelGeometry,
        layout: ModelLayout,
        host_slab: Tensor | None,
    ) -> Backend[frozenset[str]]:
        library, dtype = load(), getattr(torch, config.dtype)
        assert library is not None, "the backend is supported"
        max_tokens, max_rows = config.max_batch_tokens, config.max_sequences
        is_tiled = can_tile(config.page_size, geometry.head_dim, dtype)
        kv_cache = allocate_kv_cache(config, geometry, is_tiled=is_tiled)
        arena = allocate_arena(config, layout, host_slab)
        pack = partial(PackedLinear.pack, allocate=Slab().take)
        packed = load_weights(config.model_dir, geometry, dtype, config.device, pack)
        pages = BatchPages(max_rows, max_pages(config))
        step = StepArrays(max_tokens, max_rows, config.page_size, pages)
        lora = NativeLoraOps(arena, lora_groups(layout, config.lora_targets), max_tokens, max_rows)
        workspace = Workspace.allocate(geometry, max_tokens, max_rows, dtype)
        transformer = NativeTransformer(geometry, packed, kv_cache, step, workspace, lora, library)
        return NativeBackend(transformer, kv_cache, arena, step, lora, library)


def _native_bytes(config: EngineConfig, geometry: ModelGeometry) -> int:
    """Returns what the native kernels add to a step's memory: the rows that sample apart in the
    last layer, and each thread's memory for attention."""
    g, item_bytes = geometry, getattr(torch, config.dtype).itemsize
    shrunk = most_targets(config, g) * config.max_lora_rank
    per_sample = (g.hidden_size + g.q_size + shrunk) * item_bytes
    shape = AttentionShape(g.num_heads, g.num_kv_heads, g.head_dim, item_bytes)
    attention = shape.num_bytes(
        config.max_batch_tokens,
        config.max_sequences,
        config.num_threads or torch.get_num_threads(),
        len(set(g.sliding_windows)),
    )
    return int(config.max_sequences * per_sample + attention)
