"""The decoder in torch: one class computes any description.

It reads a step's inputs, the key-value cache, and a `Lora` if the step has adapters; requests,
pages and adapters are unknown here. The operations between the projections are one kernel each on a
device, and its definition in torch on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.config_keys import names
from inference_svc.model.description import (
    LAYER_INPUTS,
    Activation,
    Attention,
    Block,
    ClampedSwiglu,
    Decoder,
    Dense,
    Experts,
    ExpertsProjection,
    LayerInput,
    Norm,
    QueryGrowth,
)
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import Linear, RotaryEmbedding, Rotation
from inference_svc.model.lora import Lora
from inference_svc.model.rope import Rope
from inference_svc.model.weights import BlockWeights, DenseWeights, ExpertsWeights, ModelWeights
from kernels.attention import HeadNorms, attend, rotate_and_store
from kernels.elementwise import (
    NormWeight,
    add_rms_norm,
    bound_logits,
    clamped_swiglu,
    geglu,
    rms_norm,
    swiglu,
)
from kernels.elementwise.addend import Addend
from kernels.experts import Pairs, Routing, combine, experts_linear, route, sort_pairs
from kernels.lora import TokenOrder

COMPUTED = names(
    """
    decoder decoder.embedding_scale decoder.layer_inputs layer_inputs
    block block.attention_norm=none block.attention_post_norm block.feed_forward_norm=none
    block.feed_forward_post_norm block.is_parallel block.residual_scale block.scalar
    block.layer_input block.layer_input_post_norm layer_input
    layer_input.activation=gelu_pytorch_tanh
    attention attention.rope=none attention.window attention.softcap attention.query_growth
    attention.q_norm attention.k_norm attention.v_norm attention.norms_rotated
    attention.kv_layer attention.values_are_keys rope rope.part rope.is_interleaved
    attention.norms_of_all_heads attention.head_dim>256 attention.head_dim>512
    decoder.kv_shapes decoder.ropes decoder.windows
    dense dense.activation=silu dense.activation=gelu_pytorch_tanh attention.sinks
    experts experts.activation=silu experts.activation=gelu_pytorch_tanh clamped_swiglu
    experts.shared experts.shared_gate experts.norm experts.post_norm experts.shared_post_norm
    experts_projection experts_projection.has_bias router router.norm router.bias
    router.expert_scales choice choice.scoring=softmax choice.scoring=sigmoid
    choice.scoring=softmax_of_chosen choice.normalised choice.num_groups choice.num_chosen_groups
    choice.scale
    norm norm.kind=rms norm.kind=layer norm.weight_offset norm.is_wide
    projection projection.has_bias head head.scale head.softcap
    """
)
"""The features of decoders that it computes; see `model.features`."""

_GATED = {Activation.SILU: swiglu, Activation.GELU_TANH: geglu}
_NO_ROTATION = Rotation(None, None)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's data that all layers share."""

    inputs: StepInputs
    rotations: Mapping[tuple[Rope, int], Rotation]
    kv_caches: KVCaches
    lora: Lora | None
    layer_inputs: Tensor | None
    """[T, layers, size of a layer's]"""
    q_scales: Mapping[QueryGrowth, Tensor]
    """The factors of each token's queries, [T]."""
    token_order: TokenOrder | None
    """The order of pairs where adapters change experts."""
    choices: Mapping[int, Tensor]
    """Where experts are to be that tokens choose, by the layer: int32 [T, num_chosen]."""


class Outputs(NamedTuple):
    """A projection's outputs [T, size], in the model's dtype. The next operation adds `addend` to
    them."""

    values: Tensor
    addend: Addend | None = None


@dataclass(slots=True)
class Stream:
    """The residual stream [T, hidden_size], in the model's dtype. `delta`, with its `addend`, is
    still to be added to it, times `delta_scale`, and `sum_scale` multiplies their sum; the next
    norm does all of it."""

    hidden: Tensor
    delta: Tensor | None = None
    addend: Addend | None = None
    delta_scale: float = 1.0
    sum_scale: float = 1.0

    def leave(self, delta: Outputs, delta_scale: float = 1.0) -> None:
        """Leaves `delta` [T, hidden_size] to be added by the next norm."""
        self.delta, self.addend = delta
        self.delta_scale, self.sum_scale = delta_scale, 1.0

    def normed(self, norm: NormWeight | None, rows: Tensor | None = None) -> Tensor:
        """Returns its norm, or itself, of all rows or of these, int64 [N]: [T or N,
        hidden_size]."""
        delta, addend = self.delta, self.addend
        self.delta = self.addend = None
        return add_rms_norm(
            *(self.hidden, delta, norm, rows),
            delta_scale=self.delta_scale,
            sum_scale=self.sum_scale,
            addend=addend,
        )


class Transformer:
    """Computes steps operation by operation."""

    def __init__(self, description: Decoder, weights: ModelWeights[Linear]) -> None:
        self.description = description
        self.weights = weights
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self._embedding_scale = as_held(description.embedding_scale, dtype)
        self._rotary = {
            (rope, head_dim): RotaryEmbedding(rope, head_dim, device)
            for rope, head_dim in description.ropes
        }

    @torch.inference_mode()
    def forward(
        self,
        inputs: StepInputs,
        kv_caches: KVCaches,
        lora: Lora | None = None,
        choices: Tensor | None = None,
    ) -> Tensor:
        """Computes one step; returns logits [len(inputs.logit_rows), vocab_size] in the model's
        dtype, an inference tensor. See `layers`."""
        last = self.layers(inputs, kv_caches, lora, choices)
        return self.logits(last, inputs.logit_rows, lora)

    @torch.inference_mode()
    def layers(
        self,
        inputs: StepInputs,
        kv_caches: KVCaches,
        lora: Lora | None = None,
        choices: Tensor | None = None,
    ) -> Stream:
        """Computes one step up to the last norm, of all tokens.

        Writes the step's keys and values to the cells of `inputs.attention`; the positions that
        each token attends to must be in the cache already, or be computed in this step. Without
        `lora` no adapter code runs. `choices`, int32 [layers that have experts, T, num_chosen], are
        overwritten with the experts of each token.
        """
        hidden = _embedded(inputs.token_ids, self.weights.embedding, lora)
        if lora is not None:
            lora.add_embedding(inputs.token_ids, hidden)
        if self._embedding_scale != 1.0:
            hidden *= self._embedding_scale
        rotations = {
            key: rotary(inputs.positions, hidden.dtype) for key, rotary in self._rotary.items()
        }
        layer_inputs = self._layer_inputs(inputs, hidden, lora)
        q_scales = {
            growth: _q_scale(growth, inputs.positions, hidden.dtype)
            for growth in self.description.query_growths
        }
        has_experts = bool(self.description.mixtures)
        order = lora.order_tokens() if lora is not None and has_experts else None
        found = self._choices_by_layer(choices)
        step = _Step(inputs, rotations, kv_caches, lora, layer_inputs, q_scales, order, found)
        stream = Stream(hidden)
        for index, block in enumerate(self.description.blocks):
            self._block(index, block, stream, step)
        return stream

    def _choices_by_layer(self, choices: Tensor | None) -> Mapping[int, Tensor]:
        experts = self.description.expert_layers
        if choices is None or experts is None:
            return {}
        return dict(zip(experts.layers, choices, strict=True))

    def _block(self, index: int, block: Block, stream: Stream, step: _Step) -> None:
        weights, scale = self.weights.blocks[index], block.residual_scale

        def own(norm: Norm | None, weight: NormWeight | None) -> NormWeight | None:
            return _own(norm, weight, step.lora, index)

        normed = stream.normed(own(block.attention_norm, weights.attention_norm))
        delta = self._attention(index, block, weights, normed, step)
        norm = own(block.attention_post_norm, weights.attention_post_norm)
        stream.leave(_post_normed(delta, norm), scale)
        del delta  # or it would be in memory when the next norm has added it
        if block.is_parallel:
            stream.normed(None)
        else:
            del normed
            normed = stream.normed(own(block.feed_forward_norm, weights.feed_forward_norm))
        delta = self._feed_forward(index, block, weights, normed, stream.hidden, step)
        norm = own(block.feed_forward_post_norm, weights.feed_forward_post_norm)
        stream.leave(_post_normed(delta, norm), scale)
        if block.layer_input is not None:
            del normed, delta
            made = self._layer_input(index, block.layer_input, weights, stream.normed(None), step)
            norm = own(block.layer_input_post_norm, weights.layer_input_post_norm)
            stream.leave(Outputs(_normed(made, norm)))
        stream.sum_scale = weights.scalar

    def _layer_inputs(self, inputs: StepInputs, hidden: Tensor, lora: Lora | None) -> Tensor | None:
        """Computes the per-layer inputs, [T, layers, size of a layer's]."""
        described, weights = self.description.layer_inputs, self.weights.layer_inputs
        if described is None or weights is None:
            return None
        own = _embedded(inputs.token_ids, weights.embedding, lora)
        own *= as_held(described.embedding_scale, own.dtype)
        projected = _project(weights.projection, hidden, lora, LAYER_INPUTS)
        projected *= described.projection_scale
        norm = weights.norm if lora is None else lora.norm(described.norm.path(None), weights.norm)
        made = rms_norm(projected.view(len(hidden), -1, described.size), norm)
        made += own.view_as(made)
        made *= described.scale
        return made

    def _layer_input(
        self,
        index: int,
        layer_input: LayerInput,
        weights: BlockWeights[Linear],
        x: Tensor,
        step: _Step,
    ) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]."""
        assert step.layer_inputs is not None
        assert weights.layer_input is not None
        groups = [f"layers.{index}.{each.name}" for each in (layer_input.gate, layer_input.out)]
        gate = _project(weights.layer_input.gate, x, step.lora, groups[0])
        gated = _GATED[layer_input.activation](gate, step.layer_inputs[:, index])
        return _project(weights.layer_input.out, gated, step.lora, groups[1])

    def _attention(
        self,
        index: int,
        block: Block,
        weights: BlockWeights[Linear],
        x: Tensor,
        step: _Step,
    ) -> Outputs:
        """x: [T, hidden_size] -> [T, hidden_size]."""
        attention, plan = block.attention, step.inputs.attention
        rope, growth = attention.rope, attention.query_growth
        rotation = _NO_ROTATION if rope is None else step.rotations[rope, attention.head_dim]
        # Norms of all heads read qkv before it is rotated.
        adds = not attention.norms_all_heads
        qkv, addend = _project_apart(weights.qkv, x, step.lora, f"layers.{index}.qkv", adds=adds)
        cache, layer = step.kv_caches.of(index)
        rotate_and_store(
            *(qkv, cache, layer, plan.cells, *rotation),
            _own_head_norms(index, attention, weights, step.lora),
            num_heads=attention.num_heads,
            is_interleaved=rope is not None and rope.is_interleaved,
            q_scale=None if growth is None else step.q_scales[growth],
            addend=addend,
        )
        del addend
        mixed = attend(
            qkv[:, : attention.q_size].unflatten(1, (-1, attention.head_dim)),
            *(cache, layer, plan),
            scale=attention.scale,
            window=attention.window,
            softcap=attention.softcap,
            sinks=weights.sinks,
        )
        adds = block.attention_post_norm is not None or block.feed_forward_norm is not None
        name = f"layers.{index}.o"
        return _project_apart(weights.o, mixed.flatten(1), step.lora, name, adds=adds)

    def _feed_forward(
        self,
        index: int,
        block: Block,
        weights: BlockWeights[Linear],
        x: Tensor,
        hidden: Tensor,
        step: _Step,
    ) -> Outputs:
        """x, hidden (the residual stream): [T, hidden_size] -> [T, hidden_size]."""
        made = None
        if block.dense is not None and weights.dense is not None:
            adds = self._norms_feed_forward(index, block)
            made = self._dense(index, block.dense, weights.dense, x, step, adds=adds)
        if block.experts is not None and weights.experts is not None:
            shared = None if made is None else made.values
            made = Outputs(
                self._experts(index, block.experts, weights.experts, x, hidden, shared, step)
            )
        assert made is not None
        return made

    def _norms_feed_forward(self, index: int, block: Block) -> bool:
        """Returns whether a norm reads the dense half's output, or its sum with the stream."""
        if block.experts is not None:
            return False
        if block.feed_forward_post_norm is not None:
            return True
        blocks = self.description.blocks
        is_last = index + 1 == len(blocks)
        has_next = is_last or blocks[index + 1].attention_norm is not None
        return block.layer_input is None and has_next

    def _dense(
        self,
        index: int,
        dense: Dense,
        weights: DenseWeights[Linear],
        x: Tensor,
        step: _Step,
        *,
        adds: bool,
    ) -> Outputs:
        """x: [T, hidden_size] -> [T, hidden_size]. `adds`: whoever reads it adds an addend."""
        name = f"layers.{index}.gate_up"
        gate_up, addend = _project_apart(weights.gate_up, x, step.lora, name, adds=True)
        gate, up = gate_up.chunk(2, dim=-1)
        gated = _GATED[dense.activation](gate, up, addend)
        del addend
        return _project_apart(weights.down, gated, step.lora, f"layers.{index}.down", adds=adds)

    def _experts(
        self,
        index: int,
        experts: Experts,
        weights: ExpertsWeights[Linear],
        x: Tensor,
        hidden: Tensor,
        shared: Tensor | None,
        step: _Step,
    ) -> Tensor:
        """x, hidden, shared (the half that all share): [T, hidden_size] -> [T, hidden_size]."""

        def own(norm: Norm | None, weight: NormWeight | None) -> NormWeight | None:
            return _own(norm, weight, step.lora, index)

        def logits(linear: Linear, of: Tensor, name: str) -> Tensor:
            out = linear.in_fp32(of)
            if step.lora is not None:
                step.lora.add(f"layers.{index}.{name}", of, out, linear.bias)
            return out

        gate = None
        if experts.shared_gate is not None and weights.shared_gate is not None:
            gate = logits(weights.shared_gate, x, experts.shared_gate.name)
        router = experts.router
        router_x = _normed(x if router.norm is None else hidden, weights.router.norm)
        found = logits(weights.router.projection, router_x, router.projection.name)
        routing = route(
            *(found, router.choice, weights.router.bias, weights.router.expert_scales),
            out=step.choices.get(index),
        )
        x = _normed(x if experts.norm is None else hidden, own(experts.norm, weights.norm))
        made, pairs = self._of_experts(index, experts, weights, x, routing, step)
        norm = own(experts.post_norm, weights.post_norm)
        if norm is None:
            return combine(made, pairs, routing.weights, shared, gate)
        assert shared is not None
        assert gate is None
        shared_norm = own(experts.shared_post_norm, weights.shared_post_norm)
        routed = _normed(combine(made, pairs, routing.weights), norm)
        return _normed(shared, shared_norm).add_(routed)

    def _of_experts(
        self,
        index: int,
        experts: Experts,
        weights: ExpertsWeights[Linear],
        x: Tensor,
        routing: Routing,
        step: _Step,
    ) -> tuple[Tensor, Pairs]:
        """x: [T, hidden_size] -> the experts' outputs of each pair, [P, hidden_size]."""
        order = step.token_order
        tokens = None if order is None else order.tokens
        pairs = sort_pairs(routing.experts, experts.num_experts, tokens)
        lora = None
        if step.lora is not None and order is not None:
            lora = step.lora.of_pairs(order, routing.experts, pairs)

        def project(linear: Linear, described: ExpertsProjection, of: Tensor) -> Tensor:
            weight, bias = linear.of_experts(described.num_experts, described.out_features)
            out = experts_linear(of, weight, pairs, bias)
            if lora is not None:
                lora.add(f"layers.{index}.{described.name}", of, out)
            return out

        rows = x.index_select(0, pairs.tokens)
        gate, up = project(weights.gate_up, experts.gate_up, rows).chunk(2, dim=-1)
        del rows
        if isinstance(experts.activation, ClampedSwiglu):
            bounds = experts.activation
            gated = clamped_swiglu(gate, up, bounds.alpha, bounds.limit)
        else:
            gated = _GATED[experts.activation](gate, up)
        del gate, up
        return project(weights.down, experts.down, gated), pairs

    @torch.inference_mode()
    def logits(self, last: Stream, rows: Tensor, lora: Lora | None) -> Tensor:
        """Returns logits, in the model's dtype, of these rows of a step's tokens, int64 [N]. The
        `lora`'s head is of these rows."""
        head = self.description.head
        norm = self.weights.norm
        if lora is not None:
            norm = lora.norm(self.description.final_norm.module, norm, logits_only=True)
        normed = replace(last).normed(norm, rows)
        logits = self.weights.head(normed)
        if lora is None:
            return bound_logits(logits, head.scale, head.softcap)
        if lora.num_added_tokens:
            logits = F.pad(logits, (0, lora.num_added_tokens), value=float("-inf"))
        lora.add_head(normed, logits)
        bounded = bound_logits(logits, head.scale, head.softcap)
        # A cap would make numbers of absent tokens.
        absent = logits.isneginf() if lora.num_added_tokens and head.softcap else None
        return bounded if absent is None else bounded.masked_fill_(absent, float("-inf"))


def as_held(number: float, dtype: torch.dtype) -> float:
    """Returns a number as the dtype holds it."""
    return float(torch.tensor(number, dtype=dtype))


def _normed(x: Tensor, norm: NormWeight | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm)


def _post_normed(delta: Outputs, norm: NormWeight | None) -> Outputs:
    return delta if norm is None else Outputs(rms_norm(delta.values, norm, delta.addend))


def _q_scale(growth: QueryGrowth, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the factors by which each token's queries grow, [T]."""
    grown = torch.log1p(torch.floor(positions / growth.length))
    return (1 + growth.beta * grown).to(dtype)


def _project(linear: Linear, x: Tensor, lora: Lora | None, group: str) -> Tensor:
    out = linear(x)
    if lora is not None:
        lora.add(group, x, out, linear.bias)
    return out


def _project_apart(
    linear: Linear, x: Tensor, lora: Lora | None, group: str, *, adds: bool
) -> Outputs:
    """Computes outputs for a reader that adds an addend, if it `adds` any."""
    made = lora.beside(group, x, linear) if adds and lora is not None else None
    return Outputs(_project(linear, x, lora, group)) if made is None else Outputs(*made)


def _embedded(token_ids: Tensor, table: Tensor, lora: Lora | None) -> Tensor:
    """Returns rows of a table [vocab_size, size]; of tokens behind it, any."""
    if lora is not None and lora.num_added_tokens:
        token_ids = token_ids.clamp(max=len(table) - 1)
    return F.embedding(token_ids, table)


def _own(
    norm: Norm | None, weight: NormWeight | None, lora: Lora | None, layer: int | None = None
) -> NormWeight | None:
    """Returns the weight of a norm, for each token where adapters have one."""
    if norm is None or weight is None or lora is None or not norm.module:
        return weight
    return lora.norm(norm.path(layer), weight)


def _own_head_norms(
    layer: int, attention: Attention, weights: BlockWeights[Linear], lora: Lora | None
) -> HeadNorms:
    """Returns the norms of queries, keys and values, as `_own` does."""
    norms = weights.head_norms(attention)
    if lora is None:
        return norms
    pairs = (
        (attention.q_norm, weights.q_norm),
        (attention.k_norm, weights.k_norm),
        (attention.v_norm, weights.v_norm),
    )
    found = (_own(norm, weight, lora, layer) for norm, weight in pairs)
    q, k, v = (None if each is None else each.weight for each in found)
    return norms._replace(q=q, k=k, v=v)
