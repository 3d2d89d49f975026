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
from inference_svc.model.description import Activation, Attention, Block, Decoder
from inference_svc.model.rope import Rope
from inference_svc.model.weights import (
    ModelWeights,
    largest_projection_bytes,
    load_weights,
    weights_bytes,
)
from kernels.attention import KVCache, can_tile
from kernels.attention.native import (
    NativeAttention,
    query_growth_op,
    rope_and_store_op,
    rotary_angles_op,
)
from kernels.attention.native_memory import AttentionScratch, AttentionShape
from kernels.elementwise import (
    NormWeight,
    gather_op,
    geglu_op,
    rms_norm_op,
    scale_rows_op,
    swiglu_op,
)
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


_GATED = {Activation.SILU: swiglu_op, Activation.GELU_TANH: geglu_op}


@dataclass(slots=True)
class _Stream:
    """The residual stream of every token of a step, or of those that sample only. `delta` is what
    is still to be added to it, times `scale`: the next norm does it along."""

    hidden: Tensor
    count: Tensor
    samples_only: bool = False
    delta: Tensor | None = None
    scale: float = 1.0

    def leave(self, delta: Tensor, scale: float) -> None:
        assert self.delta is None
        self.delta, self.scale = delta, scale

    def take(self) -> tuple[Tensor | None, float]:
        delta, self.delta = self.delta, None
        return delta, self.scale


class NativeTransformer:
    """`step` holds the inputs and `workspace` the activations of any step."""

    def __init__(
        self,
        description: Decoder,
        weights: ModelWeights[PackedLinear],
        kv_cache: KVCache,
        step: StepArrays,
        workspace: Workspace,
        adapters: AdapterOps,
        library: Library,
    ) -> None:
        self._description = description
        self._weights = weights
        self._kv_cache = kv_cache
        self._step = step
        self._workspace = workspace
        self._adapters = adapters
        self._library = library
        self._angles = {rope: self._allocate_angles(*rope) for rope in description.ropes}
        self._q_scales = {
            growth: torch.zeros(len(step.positions)) for growth in description.query_growths
        }
        [num_heads] = {each.num_heads for each in description.attentions}
        self._scratch = AttentionScratch(AttentionShape.of(kv_cache, num_heads))
        self._attention = {
            window: NativeAttention(kv_cache, step.rows, self._scratch, window)
            for window in description.windows
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
        angles = sum(wave.nbytes for waves in self._angles.values() for wave in waves)
        angles += sum(scale.nbytes for scale in self._q_scales.values())
        attention = sum(attention.num_bytes for attention in self._attention.values())
        return self._workspace.num_bytes + angles + self._scratch.num_bytes + attention

    def _all_ops(self) -> Iterator[tuple[str, NativeOp]]:
        """Yields each operation with the group of adapters that it is part of ("": always runs)."""
        step, work, weights = self._step, self._workspace, self._weights
        description = self._description
        yield "", gather_op(weights.embedding, work.hidden, step.token_ids, step.num_tokens)
        yield from _of(EMBEDDING, self._adapters.add_embedding(step.token_ids, work.hidden))
        if description.embedding_scale != 1.0:
            scale = torch.tensor(description.embedding_scale, dtype=work.hidden.dtype).item()
            yield "", scale_rows_op(work.hidden, step.num_tokens, scale=scale)
        yield from self._position_ops()
        stream = _Stream(work.hidden, step.num_tokens)
        for index, block in enumerate(description.blocks):
            is_last = index == description.num_layers - 1
            yield from self._attention_ops(index, block, stream)
            if is_last:
                samples = _Stream(work.last_hidden, step.num_logits, samples_only=True)
                for source, out in self._sampled(block):
                    yield "", gather_op(source, out, step.logit_rows, step.num_logits)
                stream = samples
            yield from self._feed_forward_ops(index, block, stream)
        yield "", self._norm_op(weights.norm, stream)
        yield from self._project(HEAD, work.normed, weights.head, work.logits, stream)
        head = description.head
        if head.scale != 1.0 or head.softcap is not None:
            yield (
                "",
                scale_rows_op(work.logits, stream.count, scale=head.scale, softcap=head.softcap),
            )

    def _position_ops(self) -> Iterator[tuple[str, NativeOp]]:
        """What follows from positions and contexts alone, for all layers."""
        step = self._step
        for (rope, head_dim), (cos, sin) in self._angles.items():
            yield (
                "",
                rotary_angles_op(
                    *(
                        step.positions,
                        rope.inverse_frequencies(head_dim),
                        cos,
                        sin,
                        step.num_tokens,
                    ),
                    scaling=rope.attention_scaling,
                ),
            )
        for growth, scale in self._q_scales.items():
            yield "", query_growth_op(step.positions, scale, step.num_tokens, **growth._asdict())
        for attention in self._attention.values():
            yield "", attention.items_op()

    def _sampled(self, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields what the last layer reads on after its attention, with where the rows of it go
        that sample: the others are done."""
        work = self._workspace
        yield work.hidden, work.last_hidden
        yield work.mixed_of(block.attention.q_size), work.last_mixed
        if block.is_parallel:
            yield work.normed, work.last_normed

    def _attention_ops(
        self, index: int, block: Block, stream: _Stream
    ) -> Iterator[tuple[str, NativeOp]]:
        """Up to what attention weighs, of every token."""
        work, weights, attention = self._workspace, self._weights.blocks[index], block.attention
        x = work.hidden if weights.attention_norm is None else work.normed
        yield from _of("", self._add_and_norm(weights.attention_norm, stream))
        qkv = work.qkv_of(attention.qkv.out_features)
        yield from self._project(f"layers.{index}.qkv", x, weights.qkv, qkv, stream)
        yield "", self._rope_and_store_op(index, attention, qkv)
        yield (
            "",
            self._attention[attention.window].attend_op(
                *(qkv, work.mixed_of(attention.q_size), index),
                scale=attention.scale,
                softcap=attention.softcap,
            ),
        )

    def _allocate_angles(self, rope: Rope, head_dim: int) -> tuple[Tensor, Tensor]:
        shape = (len(self._step.positions), rope.rotary_size(head_dim) // 2)
        dtype = self._workspace.hidden.dtype
        return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def _rope_and_store_op(self, index: int, attention: Attention, qkv: Tensor) -> NativeOp:
        rope, weights = attention.rope, self._weights.blocks[index]
        cos, sin = (None, None) if rope is None else self._angles[rope, attention.head_dim]
        q_norm, k_norm = weights.q_norm, weights.k_norm
        growth = attention.query_growth
        return rope_and_store_op(
            *(qkv, self._kv_cache, index, cos, sin, self._step.rows),
            num_heads=attention.num_heads,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            is_interleaved=rope is not None and rope.is_interleaved,
            norms_rotated=attention.norms_rotated,
            q_scale=None if growth is None else self._q_scales[growth],
        )

    def _feed_forward_ops(
        self, index: int, block: Block, stream: _Stream
    ) -> Iterator[tuple[str, NativeOp]]:
        """From what attention weighed on, of the tokens that are left."""
        work, weights, name = self._workspace, self._weights.blocks[index], f"layers.{index}"
        mixed = work.last_mixed if stream.samples_only else work.mixed_of(block.attention.q_size)
        yield from self._project(f"{name}.o", mixed, weights.o, work.delta, stream)
        yield from _of("", self._post_norm(weights.attention_post_norm, stream))
        stream.leave(work.delta, block.residual_scale)
        if block.is_parallel:
            x = work.last_normed if stream.samples_only else work.normed
            x = stream.hidden if weights.attention_norm is None else x
        else:
            x = stream.hidden if weights.feed_forward_norm is None else work.normed
        yield from _of("", self._add_and_norm(weights.feed_forward_norm, stream))
        size = block.feed_forward.size
        gate_up, gated = work.gate_up_of(size), work.gated_of(size)
        yield from self._project(f"{name}.gate_up", x, weights.gate_up, gate_up, stream)
        yield "", _GATED[block.feed_forward.activation](gate_up, gated, stream.count)
        yield from self._project(f"{name}.down", gated, weights.down, work.delta, stream)
        yield from _of("", self._post_norm(weights.feed_forward_post_norm, stream))
        stream.leave(work.delta, block.residual_scale)

    def _add_and_norm(self, norm: NormWeight | None, stream: _Stream) -> Iterator[NativeOp]:
        if norm is not None or stream.delta is not None:
            yield self._norm_op(norm, stream)

    def _norm_op(self, norm: NormWeight | None, stream: _Stream) -> NativeOp:
        """Adds to the residual stream what was left to it, and norms that."""
        weight, eps, is_centred = norm or (None, 0.0, False)
        delta, scale = stream.take()
        return rms_norm_op(
            *(stream.hidden, delta, weight, self._workspace.normed, stream.count),
            eps=eps,
            delta_scale=scale,
            is_centred=is_centred,
        )

    def _post_norm(self, norm: NormWeight | None, stream: _Stream) -> Iterator[NativeOp]:
        delta = self._workspace.delta
        if norm is not None:
            yield rms_norm_op(
                *(delta, None, norm.weight, delta, stream.count),
                eps=norm.eps,
                is_centred=norm.is_centred,
            )

    def _project(
        self, group: str, x: Tensor, weights: PackedLinear, out: Tensor, stream: _Stream
    ) -> Iterator[tuple[str, NativeOp]]:
        yield "", linear_op(x, weights, out, stream.count)
        yield from _of(group, self._adapters.add(group, x, out, samples_only=stream.samples_only))


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

    def memory_needs(self, config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
        dtype = getattr(torch, config.dtype)
        needed_bytes = weights_bytes(decoder, dtype)
        if decoder.head.is_tied:  # packed, the head cannot share the embedding's memory
            needed_bytes += decoder.vocab_size * decoder.hidden_size * dtype.itemsize
        workspace = step_bytes(config, decoder) + _native_bytes(config, decoder)
        # While a projection is packed, the tensor of its file is in memory as well.
        return MemoryNeeds(needed_bytes, workspace, largest_projection_bytes(decoder, dtype))

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        return None

    def build(
        self,
        config: EngineConfig,
        decoder: Decoder,
        layout: ModelLayout,
        host_slab: Tensor | None,
    ) -> Backend[frozenset[str]]:
        library, dtype = load(), getattr(torch, config.dtype)
        assert library is not None, "the backend is supported"
        max_tokens, max_rows = config.max_batch_tokens, config.max_sequences
        is_tiled = can_tile(config.page_size, decoder.kv_shape["head_dim"], dtype)
        kv_cache = allocate_kv_cache(config, decoder, is_tiled=is_tiled)
        arena = allocate_arena(config, layout, host_slab)
        pack = partial(PackedLinear.pack, allocate=Slab().take)
        packed = load_weights(config.model_dir, decoder, dtype, config.device, pack)
        pages = BatchPages(max_rows, max_pages(config))
        step = StepArrays(max_tokens, max_rows, config.page_size, pages)
        lora = NativeLoraOps(arena, lora_groups(layout, config.lora_targets), max_tokens, max_rows)
        workspace = Workspace.allocate(decoder, max_tokens, max_rows, dtype)
        transformer = NativeTransformer(decoder, packed, kv_cache, step, workspace, lora, library)
        return NativeBackend(transformer, kv_cache, arena, step, lora, library)


def _native_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns what the native kernels add to a step's memory: the rows that sample apart in the
    last layer, and each thread's memory for attention."""
    item_bytes = getattr(torch, config.dtype).itemsize
    shrunk = most_targets(config, decoder) * config.max_lora_rank
    last = decoder.blocks[-1]
    stream = decoder.hidden_size * (2 if last.is_parallel else 1)
    per_sample = (stream + last.attention.q_size + shrunk) * item_bytes
    attention = max(
        AttentionShape(each.num_heads, each.num_kv_heads, each.head_dim, item_bytes).num_bytes(
            config.max_batch_tokens,
            config.max_sequences,
            config.num_threads or torch.get_num_threads(),
            len(decoder.windows),
        )
        for each in set(decoder.attentions)
    )
    growths = 4 * config.max_batch_tokens * len(decoder.query_growths)
    return int(config.max_sequences * per_sample + attention + growths)
