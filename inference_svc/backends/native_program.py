"""The decoder as one program in C++: its operations, top down, over fixed buffers.

The computation of `Transformer`, in the same order and with the same roundings, but in one call: no
Python between operations, no allocation. Programs differ only in which adapters' operations they
hold.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.adapters.layout import EMBEDDING, HEAD
from inference_svc.backends.native_buffers import StepArrays, Workspace
from inference_svc.backends.native_experts import NativeExperts, routings_bytes
from inference_svc.backends.native_ops import (
    ADDED_TOKENS,
    GATED,
    HEAD_NORMS,
    WITHOUT,
    AdapterOps,
    GroupedOp,
    LayerOps,
    Stream,
    is_in,
    of_group,
)
from inference_svc.model.description import (
    EMBED_TOKENS,
    LAYER_INPUTS,
    LM_HEAD,
    Attention,
    Block,
    Decoder,
    Dense,
    LayerInputs,
)
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.rope import Rope
from inference_svc.model.transformer import as_held
from inference_svc.model.weights import (
    DenseWeights,
    LayerInputsWeights,
    ModelWeights,
)
from kernels.attention import HeadNorms
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
    rms_norm_op,
    scale_rows_op,
)
from kernels.linear import PackedLinear, linear_op
from kernels.native.library import Library, NativeOp, Program

MAX_PROGRAMS = 16
"""Tenants choose the targets of their adapters, so that the number must be limited: of each part of
a step."""


class _Part(enum.Enum):
    """The part of a step that a program computes: all, of which the last layer goes on with the
    rows that sample behind its attention; all layers of all tokens; or the logits of some of
    these."""

    STEP = enum.auto()
    LAYERS = enum.auto()
    HEAD = enum.auto()


class _ProgramKey(NamedTuple):
    """Which adapters' operations a program has, and its outputs."""

    groups: frozenset[str]
    part: _Part = _Part.STEP


class NativeTransformer:
    """`step` holds the inputs and `workspace` the activations of any step."""

    def __init__(
        self,
        description: Decoder,
        weights: ModelWeights[PackedLinear],
        kv_caches: KVCaches,
        step: StepArrays,
        workspace: Workspace,
        adapters: AdapterOps,
        library: Library,
    ) -> None:
        self._description = description
        self._weights = weights
        self._kv_caches = kv_caches
        self._step = step
        self._workspace = workspace
        self._adapters = adapters
        self._library = library
        self._angles = {rope: self._allocate_angles(*rope) for rope in description.ropes}
        self._q_scales = {
            growth: torch.zeros(len(step.positions), dtype=workspace.hidden.dtype)
            for growth in description.query_growths
        }
        self._ops = LayerOps(workspace, adapters)
        self._experts = NativeExperts(description, len(step.positions), self._ops)
        self._scratches: dict[AttentionShape, AttentionScratch] = {}
        self._attention: dict[tuple[AttentionShape, int | None], NativeAttention] = {}
        for index, attention in enumerate(description.attentions):
            self._add_attention(index, attention)
        self._program_ops = tuple(self._all_ops())
        self._apart: Mapping[_Part, tuple[GroupedOp, ...]] = {}  # made when first needed
        tagged = (
            group for group, _ in self._program_ops if group and not group.startswith(WITHOUT)
        )
        self.every_group = frozenset((*tagged, ADDED_TOKENS))
        always_there = (_ProgramKey(frozenset()), _ProgramKey(self.every_group))
        self._programs = {key: self._build(key) for key in always_there}

    def forward(
        self,
        groups: frozenset[str] = frozenset(),
        *,
        returns_experts: bool = False,
        is_scored: bool = False,
    ) -> Tensor:
        """Runs the step that `step` describes, with adapters in `groups` only. Returns fp32 logits
        [num_logits, vocab_size], or more by the tokens that adapters may add, overwritten by the
        next run. With `returns_experts`, `choices` are of all tokens afterwards; else the last
        layer's are of the rows' last tokens. If it `is_scored`, `logits` may follow."""
        if is_scored or (returns_experts and self._routes_fewer):
            self.program(groups, _Part.LAYERS).run()
            return self.logits(groups)
        return self._run_head(groups, _Part.STEP)

    def logits(self, groups: frozenset[str]) -> Tensor:
        """Returns fp32 logits [num_logits, vocab_size], as `forward`, of the tokens that
        `step.logit_rows` says now, after all layers have computed all tokens of the step."""
        return self._run_head(groups, _Part.HEAD)

    def _run_head(self, groups: frozenset[str], part: _Part) -> Tensor:
        logits = self._workspace.logits[: int(self._step.num_logits)]
        groups, vocab_size = self._computed(groups, part), self._description.vocab_size
        if ADDED_TOKENS in groups:
            logits[:, vocab_size:] = float("-inf")
        else:
            logits = logits[:, :vocab_size]
        self.program(groups, part).run()
        return logits

    @property
    def choices(self) -> Tensor | None:
        """The experts that each token of the last step has chosen, int32 [layers that have experts,
        T, num_chosen]."""
        choices = self._experts.choices
        return None if choices is None else choices[:, : self._step.size.tokens]

    @property
    def _routes_fewer(self) -> bool:
        """Whether a program that ends with the rows' last tokens routes fewer than all of the
        step's in a layer."""
        size = self._step.size
        return self._description.blocks[-1].experts is not None and size.logits < size.tokens

    def program(self, groups: frozenset[str], part: _Part = _Part.STEP) -> Program:
        """Returns the program of `groups`, or the program of all groups if there are too many
        programs: then groups that no adapter changes cost the step a check of their ranks."""
        key = _ProgramKey(self._computed(groups, part), part)
        if key not in self._programs:
            self._programs[key] = self._build(key)
        return self._programs[key]

    def _computed(self, groups: frozenset[str], part: _Part = _Part.STEP) -> frozenset[str]:
        # Where no row has an adapter there is no plan that operations of adapters could follow.
        if not groups or _ProgramKey(groups, part) in self._programs:
            return groups
        is_full = sum(key.part is part for key in self._programs) >= MAX_PROGRAMS
        return self.every_group if is_full else groups

    def num_ops(self, groups: frozenset[str]) -> Counter[str]:
        """Counts the operations, by group, that the program with adapters in `groups` has more than
        the base's."""
        computed = self._computed(groups)
        counts = Counter(group for group, _ in self._program_ops if group in computed)
        counts.subtract(
            name
            for group, _ in self._program_ops
            if group.startswith(WITHOUT) and (name := group.removeprefix(WITHOUT)) in computed
        )
        return counts

    def _build(self, key: _ProgramKey) -> Program:
        ops = self._program_ops
        if key.part is not _Part.STEP:
            self._apart = self._apart or self._ops_apart()
            ops = self._apart[key.part]
        return self._library.program(
            [op for group, op in ops if not group or is_in(group, key.groups)]
        )

    def _ops_apart(self) -> Mapping[_Part, tuple[GroupedOp, ...]]:
        """Returns the operations of all layers, of all tokens, and the head's."""
        stream = Stream(self._workspace.hidden, self._step.num_tokens)
        layers = tuple(self._layers_ops(stream, logits_only=False))
        head = (*self._chosen_ops(stream), *self._head_ops(stream))
        return {_Part.LAYERS: layers, _Part.HEAD: head}

    @property
    def num_bytes(self) -> int:
        """The memory that steps are computed in."""
        angles = sum(wave.nbytes for waves in self._angles.values() for wave in waves)
        angles += sum(scale.nbytes for scale in self._q_scales.values())
        angles += routings_bytes(self._description, len(self._step.positions))
        attention = sum(attention.num_bytes for attention in self._attention.values())
        attention += sum(scratch.num_bytes for scratch in self._scratches.values())
        return self._workspace.num_bytes + angles + attention

    def _add_attention(self, index: int, attention: Attention) -> None:
        """Layers of one shape share their workspace; of one window, too, their work items."""
        cache, _ = self._kv_caches.of(index)
        shape, window = AttentionShape.of(cache, attention.num_heads), attention.window
        if shape not in self._scratches:
            self._scratches[shape] = AttentionScratch(shape)
        if (shape, window) not in self._attention:
            scratch = self._scratches[shape]
            self._attention[shape, window] = NativeAttention(
                cache, self._step.rows, scratch, window
            )

    def _all_ops(self) -> Iterator[GroupedOp]:
        """Yields each operation with the group of adapters that it is part of ("": always runs).
        Behind its attention the last layer goes on with the rows' last tokens."""
        stream = Stream(self._workspace.hidden, self._step.num_tokens)
        yield from self._layers_ops(stream, logits_only=True)
        yield from self._head_ops(stream)

    def _layers_ops(self, stream: Stream, *, logits_only: bool) -> Iterator[GroupedOp]:
        """Yields the operations of all layers, after which `stream` is their result: with
        `logits_only` of the rows' last tokens."""
        step, work, weights = self._step, self._workspace, self._weights
        description = self._description
        yield "", gather_op(weights.embedding, work.hidden, step.token_ids, step.num_tokens)
        own = self._adapters.replace_embeddings(step.token_ids, work.hidden)
        yield from of_group(EMBED_TOKENS, own)
        yield from of_group(EMBEDDING, self._adapters.add_embedding(step.token_ids, work.hidden))
        if description.embedding_scale != 1.0:
            scale = as_held(description.embedding_scale, work.hidden.dtype)
            yield "", scale_rows_op(work.hidden, step.num_tokens, scale=scale)
        if description.layer_inputs is not None and weights.layer_inputs is not None:
            yield from self._layer_inputs_ops(description.layer_inputs, weights.layer_inputs)
        yield from self._position_ops()
        for index, block in enumerate(description.blocks):
            is_last = index == description.num_layers - 1
            yield from self._attention_ops(index, block, stream)
            if is_last and logits_only:
                for source, out in self._last_tokens(block):
                    yield "", gather_op(source, out, step.logit_rows, step.num_logits)
                self._go_on_with_logits(stream)
            yield from self._feed_forward_ops(index, block, stream)
            if block.layer_input is not None:
                yield from self._layer_input_ops(index, block, stream)
            stream.sum_scale = weights.blocks[index].scalar

    def _go_on_with_logits(self, stream: Stream) -> None:
        stream.hidden, stream.count = self._workspace.last_hidden, self._step.num_logits
        stream.logits_only = True

    def _chosen_ops(self, stream: Stream) -> Iterator[GroupedOp]:
        """Goes on with the tokens of `logit_rows`, of a stream of all tokens, which stays as it
        is."""
        step, work = self._step, self._workspace
        rows = step.logit_rows, step.num_logits
        yield "", gather_op(stream.hidden, work.last_hidden, *rows)
        if stream.delta is not None:
            yield "", gather_op(stream.delta, work.last_delta, *rows)
            stream.delta = work.last_delta
        self._go_on_with_logits(stream)

    def _head_ops(self, stream: Stream) -> Iterator[GroupedOp]:
        """The last norm and the logits, of the tokens that get these."""
        work, weights, description = self._workspace, self._weights, self._description
        yield from self._ops.add_and_norm(description.final_norm, weights.norm, stream)
        logits = work.logits[:, : description.vocab_size]
        yield "", linear_op(work.normed, weights.head, logits, stream.count)
        yield from of_group(LM_HEAD, self._adapters.replace_logits(work.normed, work.logits))
        added = self._adapters.add(HEAD, work.normed, work.logits, None, logits_only=True)
        yield from of_group(HEAD, added)
        head = description.head
        if head.scale != 1.0 or head.softcap is not None:
            yield (
                "",
                scale_rows_op(work.logits, stream.count, scale=head.scale, softcap=head.softcap),
            )

    def _layer_inputs_ops(
        self, described: LayerInputs, weights: LayerInputsWeights[PackedLinear]
    ) -> Iterator[GroupedOp]:
        """The per-layer inputs, of all layers."""
        step, work, count = self._step, self._workspace, self._step.num_tokens
        own = work.rows_of(work.gate_up, described.total_size)
        yield "", gather_op(weights.embedding, own, step.token_ids, count)
        scale = as_held(described.embedding_scale, own.dtype)
        yield "", scale_rows_op(own, count, scale=scale)
        stream, made = Stream(work.hidden, count), work.layer_inputs
        yield from self._ops.project(LAYER_INPUTS, work.hidden, weights.projection, made, stream)
        yield "", scale_rows_op(made, count, scale=described.projection_scale)
        parts = made.view(-1, described.size)

        def norm_op(norm: NormWeight) -> NativeOp:
            return rms_norm_op(
                *(parts, None, norm.weight, parts, count),
                eps=norm.eps,
                rows_per_count=made.shape[1] // described.size,
            )

        yield from self._ops.normed(described.norm.path(None), weights.norm, norm_op, stream)
        yield "", rms_norm_op(made, own, None, made, count, eps=0.0, sum_scale=described.scale)

    def _position_ops(self) -> Iterator[GroupedOp]:
        """The values that follow from positions and contexts alone, for all layers."""
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

    def _last_tokens(self, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the tensors that the last layer reads after its attention, with the places of the
        rows' last tokens: the others are done."""
        work, size = self._workspace, block.attention.q_size
        yield work.hidden, work.last_hidden
        yield work.rows_of(work.mixed, size), work.last_mixed
        if block.is_parallel:
            yield work.normed, work.last_normed
        if block.layer_input is not None:
            yield self._layer_input_of(self._description.num_layers - 1), work.last_layer_input

    def _layer_input_of(self, layer: int) -> Tensor:
        """Returns a layer's own input, of all tokens, [T, size]."""
        made = self._workspace.layer_inputs
        return made.unflatten(1, (self._description.num_layers, -1))[:, layer]

    def _attention_ops(self, index: int, block: Block, stream: Stream) -> Iterator[GroupedOp]:
        """The operations before attention, of every token."""
        work, weights, attention = self._workspace, self._weights.blocks[index], block.attention
        x = work.hidden if weights.attention_norm is None else work.normed
        yield from self._ops.add_and_norm(
            block.attention_norm, weights.attention_norm, stream, index
        )
        qkv = work.rows_of(work.qkv, attention.qkv.out_features)
        yield from self._ops.project(f"layers.{index}.qkv", x, weights.qkv, qkv, stream)
        yield from self._rope_and_store_ops(index, attention, qkv)
        cache, layer = self._kv_caches.of(index)
        shape = AttentionShape.of(cache, attention.num_heads)
        yield (
            "",
            self._attention[shape, attention.window].attend_op(
                *(qkv, work.rows_of(work.mixed, attention.q_size), layer),
                scale=attention.scale,
                softcap=attention.softcap,
                sinks=weights.sinks,
            ),
        )

    def _allocate_angles(self, rope: Rope, head_dim: int) -> tuple[Tensor, Tensor]:
        shape = (len(self._step.positions), rope.rotary_size(head_dim) // 2)
        dtype = self._workspace.hidden.dtype
        return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def _rope_and_store_ops(
        self, index: int, attention: Attention, qkv: Tensor
    ) -> Iterator[GroupedOp]:
        rope, weights = attention.rope, self._weights.blocks[index]
        cos, sin = (None, None) if rope is None else self._angles[rope, attention.head_dim]
        growth = attention.query_growth

        def store_op(norms: HeadNorms) -> NativeOp:
            return rope_and_store_op(
                *(qkv, *self._kv_caches.of(index), cos, sin, self._step.rows),
                norms,
                num_heads=attention.num_heads,
                is_interleaved=rope is not None and rope.is_interleaved,
                q_scale=None if growth is None else self._q_scales[growth],
            )

        norms, group = weights.head_norms(attention), ""
        own = {"q": norms.q, "k": norms.k, "v": norms.v}
        for side, norm, weight in (
            ("q", attention.q_norm, weights.q_norm),
            ("k", attention.k_norm, weights.k_norm),
            ("v", attention.v_norm, weights.v_norm),
        ):
            if norm is None or weight is None or not norm.module:
                continue
            path = norm.path(index)
            found = self._adapters.token_weights(path, weight, logits_only=False)
            if found is not None:
                group = f"{path.rpartition('.')[0]}.{HEAD_NORMS}"
                own[side] = found[1].weight
                yield group, found[0]
        if group:
            yield group, store_op(norms._replace(q=own["q"], k=own["k"], v=own["v"]))
        yield WITHOUT + group if group else "", store_op(norms)

    def _feed_forward_ops(self, index: int, block: Block, stream: Stream) -> Iterator[GroupedOp]:
        """The operations after attention, of the tokens that are left."""
        work, weights, name = self._workspace, self._weights.blocks[index], f"layers.{index}"
        mixed = work.rows_of(work.mixed, block.attention.q_size)
        mixed = work.last_mixed if stream.logits_only else mixed
        yield from self._ops.project(f"{name}.o", mixed, weights.o, work.delta, stream)
        norm = weights.attention_post_norm
        yield from self._ops.post_norm(block.attention_post_norm, norm, stream, index)
        stream.leave(work.delta, block.residual_scale)
        if block.is_parallel:
            x = work.last_normed if stream.logits_only else work.normed
        else:
            x = stream.hidden if weights.feed_forward_norm is None else work.normed
        norm = weights.feed_forward_norm
        yield from self._ops.add_and_norm(block.feed_forward_norm, norm, stream, index)
        if block.dense is not None and weights.dense is not None:
            yield from self._dense_ops(name, block.dense, weights.dense, x, stream)
        if block.experts is not None and weights.experts is not None:
            yield from self._experts.layer_ops(index, block.experts, weights.experts, x, stream)
        norm = weights.feed_forward_post_norm
        yield from self._ops.post_norm(block.feed_forward_post_norm, norm, stream, index)
        stream.leave(work.delta, block.residual_scale)

    def _dense_ops(
        self,
        name: str,
        dense: Dense,
        weights: DenseWeights[PackedLinear],
        x: Tensor,
        stream: Stream,
    ) -> Iterator[GroupedOp]:
        """Writes a dense half's output to `delta`."""
        work, size = self._workspace, dense.size
        gate_up, gated = work.rows_of(work.gate_up, 2 * size), work.rows_of(work.gated, size)
        yield from self._ops.project(f"{name}.gate_up", x, weights.gate_up, gate_up, stream)
        gate, up = gate_up.chunk(2, dim=1)
        yield "", GATED[dense.activation](gate, up, gated, stream.count)
        yield from self._ops.project(f"{name}.down", gated, weights.down, work.delta, stream)

    def _layer_input_ops(self, index: int, block: Block, stream: Stream) -> Iterator[GroupedOp]:
        """A layer's output for its own input, of the tokens that are left."""
        work, weights, layer_input = self._workspace, self._weights.blocks[index], block.layer_input
        assert layer_input is not None
        size = layer_input.out.in_features
        assert weights.layer_input is not None
        yield from self._ops.add_and_norm(None, None, stream)
        names = [f"layers.{index}.{each.name}" for each in (layer_input.gate, layer_input.out)]
        gate, gated = (work.rows_of(each, size) for each in (work.gate_up, work.gated))
        yield from self._ops.project(
            names[0], stream.hidden, weights.layer_input.gate, gate, stream
        )
        own = work.last_layer_input if stream.logits_only else self._layer_input_of(index)
        yield "", GATED[layer_input.activation](gate, own, gated, stream.count)
        yield from self._ops.project(names[1], gated, weights.layer_input.out, work.delta, stream)
        norm = weights.layer_input_post_norm
        yield from self._ops.post_norm(block.layer_input_post_norm, norm, stream, index)
        stream.leave(work.delta)
