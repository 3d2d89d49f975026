"""The decoder in torch: executes the operations of any description.

It reads a step's inputs, the key-value cache, and a `Lora` if the step has adapters; requests,
pages and adapters are unknown here. The operations between the projections are one kernel each on a
device, and its definition in torch on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.config.keys import names
from inference_svc.model.description import Activation, ClampedSwiglu, Decoder
from inference_svc.model.encoder import in_torch as encoder_in_torch
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import RotaryEmbedding, Rotation, TorchLinear
from inference_svc.model.lifetimes import last_uses
from inference_svc.model.lora import ExpertsLora, Lora
from inference_svc.model.mixers import in_torch as mixers_in_torch
from inference_svc.model.operations import (
    HEAD_KEY,
    AddNorm,
    Angles,
    Attend,
    Combine,
    Embed,
    Gate,
    GateHeads,
    Growth,
    Logits,
    NormOf,
    Op,
    Project,
    ProjectExperts,
    Regroup,
    RotateAndStore,
    Route,
    Rows,
    Run,
    Scale,
    Spread,
    Value,
)
from inference_svc.model.rope import Rope
from inference_svc.model.sharding import in_torch as ranks_in_torch
from inference_svc.model.sharding.exchange import Exchange
from inference_svc.model.step import Step
from inference_svc.model.walk import operations
from kernels.attention import HeadNorms, attend, rotate_and_store
from kernels.elementwise import (
    add_rms_norm,
    bound_logits,
    clamped_swiglu,
    exact_geglu,
    geglu,
    rms_norm,
    swiglu,
)
from kernels.experts import Pairs, Routing, combine, own_pairs, route, sort_pairs
from kernels.recurrence import gate_heads

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
    attention.has_gate attention.sinks attention.only_looks_back
    gated_delta gated_delta.is_by_key_head short_conv
    dense dense.activation=silu dense.activation=gelu_pytorch_tanh
    experts experts.activation=silu experts.activation=gelu_pytorch_tanh clamped_swiglu
    experts.shared experts.shared_gate experts.norm experts.post_norm experts.shared_post_norm
    experts_projection experts_projection.has_bias router router.norm router.bias
    router.expert_scales choice choice.scoring=softmax choice.scoring=sigmoid
    choice.scoring=softmax_of_chosen choice.normalised choice.num_groups choice.num_chosen_groups
    choice.scale
    norm norm.kind=rms norm.kind=layer norm.weight_offset norm.is_wide
    projection projection.has_bias head head.scale head.softcap
    projection.formats experts_projection.format head.format weight_format
    weight_format.codes=int4 weight_format.codes=uint4 weight_format.codes=nf4
    weight_format.codes=fp4 weight_format.codes=int8 weight_format.codes=fp8
    weight_format.group_size weight_format.odd_groups weight_format.has_offsets
    weight_format.activations=exact weight_format.activations=int8
    """
)
"""The features of decoders that it computes; see `model.features`."""

OF_RANKS = names(
    """
    decoder.rank rank projection.in_cut experts_projection.in_cut experts_projection.cut norm.cut
    """
)
"""The features of a rank's part of a decoder, which it computes as well."""

OF_STAGES = names("decoder.stage stage")
"""The features of a stage's part of a decoder, which it computes as well."""

_GATED = {Activation.SILU: swiglu, Activation.GELU_TANH: geglu, Activation.GELU: exact_geglu}
_NO_ROTATION = Rotation(None, None)


class Routed(NamedTuple):
    """The experts of a layer's tokens, the pairs of both, and the adapters of these."""

    routing: Routing
    pairs: Pairs
    lora: ExpertsLora | None


class Transformer:
    """Computes steps operation by operation: of a stage its part, and logits where it has any.
    Adapters may have up to `num_added_tokens` behind the vocabulary, of which stages must know."""

    def __init__(
        self,
        description: Decoder,
        weights: ModelWeights[TorchLinear],
        exchange: Exchange | None = None,
        num_added_tokens: int = 0,
    ) -> None:
        is_whole = description.rank is None and description.stage is None
        assert is_whole == (exchange is None)
        self.description = description
        self.weights = weights
        self._exchange = exchange
        self._num_added_tokens = num_added_tokens
        device = weights.embedding.device
        self.rotary: Mapping[tuple[Rope, int], RotaryEmbedding] = {
            (rope, head_dim): RotaryEmbedding(rope, head_dim, device)
            for rope, head_dim in description.ropes
        }
        found = operations(description)
        self.columns = _columns((*found.layers, *found.head), device)
        self._layers = _Calls.of(found.layers, found.kept)
        self._head = _Calls.of(found.head, [op.out for op in found.head[-1:]])
        self._norm = _Calls.of(found.norm, [op.out for op in found.norm[-1:]])

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
        return self._finished(self.layers(inputs, kv_caches, lora, choices))

    @torch.inference_mode()
    def layers(
        self,
        inputs: StepInputs,
        kv_caches: KVCaches,
        lora: Lora | None = None,
        choices: Tensor | None = None,
    ) -> Step:
        """Computes one step up to the last norm, of all tokens.

        Writes the step's keys and values to the cells of `inputs.attention`; the positions that
        each token attends to must be in the cache already, or be computed in this step. Without
        `lora` no adapter code runs. `choices`, int32 [layers that have experts, T, num_chosen], are
        overwritten with the experts of each token.
        """
        experts = self.description.expert_layers
        order = lora.order_tokens() if lora is not None and experts is not None else None
        found: Mapping[int, Tensor] = {}
        if choices is not None and experts is not None:
            found = dict(zip(experts.layers, choices, strict=True))
        step = Step(
            self.weights,
            self.rotary,
            inputs,
            kv_caches,
            lora,
            self.columns,
            inputs.logit_rows,
            found,
            order,
            self._exchange,
            self._num_added_tokens,
        )
        self._layers.run(step)
        return step

    @torch.inference_mode()
    def logits(self, last: Step, rows: Tensor, lora: Lora | None) -> Tensor:
        """Returns logits, in the model's dtype, of these rows of a step's tokens, int64 [N], when
        all layers have computed it. The `lora`'s head is of these rows."""
        return self._finished(_chosen(last, rows, lora))

    @torch.inference_mode()
    def hidden(self, last: Step, rows: Tensor, lora: Lora | None) -> Tensor:
        """Returns final hidden states [N, hidden_size], the last norm's output; see `logits`."""
        return self._norm.run(_chosen(last, rows, lora))

    def _finished(self, step: Step) -> Tensor:
        """Computes the head, after which the step has nothing else left; nothing where other ranks
        have the logits."""
        if not self._head.calls:
            return self.weights.embedding.new_empty(0, 0)
        logits = self._head.run(step)
        assert not step.addends, "no operation has added them"
        return logits


def _chosen(last: Step, rows: Tensor, lora: Lora | None) -> Step:
    """Returns a step that goes on with these rows; the layers' values stay."""
    values, addends = dict(last.values), dict(last.addends)
    return replace(last, rows=rows, lora=lora, values=values, addends=addends)


class _Calls(NamedTuple):
    """The functions that compute operations, with these, and the values to let go of then."""

    calls: Sequence[tuple[Callable[[Any, Step], object], Op, tuple[Value, ...]]]

    @classmethod
    def of(cls, ops: Sequence[Op], kept: Collection[Value]) -> _Calls:
        ends = zip(ops, last_uses(ops, kept), strict=True)
        return cls([(COMPUTE[type(op)], op, ended) for op, ended in ends])

    def run(self, step: Step) -> Any:
        """Returns the value that the last operation writes, if it is kept."""
        values = step.values
        for compute, op, ended in self.calls:
            values[op.out] = compute(op, step)
            for value in ended:
                del values[value]
        return values.get(self.calls[-1][1].out) if self.calls else None


@lru_cache(maxsize=64)
def as_held(number: float, dtype: torch.dtype) -> float:
    """Returns a number as the dtype holds it."""
    return float(torch.tensor(number, dtype=dtype))


def _embed(op: Embed, step: Step) -> Tensor:
    """Looks up rows; of tokens behind the table, any."""
    table, token_ids = step.weights.tables[op.table.key], step.inputs.token_ids
    lora = step.lora
    if op.table.cut is not None:
        out = ranks_in_torch.embed(token_ids, table, op.table.cut, step.ranks)
    else:
        # Of several stages this one does not know whether an adapter's head has tokens of its own.
        if step.num_added_tokens or (lora is not None and lora.num_added_tokens):
            token_ids = token_ids.clamp(max=len(table) - 1)
        out = F.embedding(token_ids, table)
    if lora is not None and op.is_adapted:
        lora.add_embedding(step.inputs.token_ids, out)
    return out


def _scale(op: Scale, step: Step) -> Tensor:
    x: Tensor = step.values[op.out]
    x *= as_held(op.scale, x.dtype) if op.is_rounded else op.scale
    return x


def _angles(op: Angles, step: Step) -> Rotation:
    rotary = step.rotary[op.rope, op.head_dim]
    return rotary(step.inputs.positions, step.dtype)


def _growth(op: Growth, step: Step) -> Tensor:
    """[T]"""
    grown = torch.log1p(torch.floor(step.inputs.positions / op.growth.length))
    return (1 + op.growth.beta * grown).to(step.weights.embedding.dtype)


def _add_norm(op: AddNorm, step: Step) -> Tensor:
    hidden, delta = op.hidden, op.delta
    is_narrowed = hidden.rows is not op.out.rows
    return add_rms_norm(
        step.values[hidden],
        None if delta is None else step.values[delta],
        step.norm(op.norm, op.layer, op.out.rows),
        step.rows if is_narrowed else None,
        delta_scale=op.delta_scale,
        sum_scale=step.weights.scale(op.sum_scale),
        addend=None if delta is None else step.addends.pop(delta, None),
    )


def _norm_of(op: NormOf, step: Step) -> Tensor:
    (source,) = op.inputs
    x, norm = step.values[source], step.norm(op.norm, op.layer, op.out.rows)
    assert norm is not None
    if op.norm.size == source.width:
        return rms_norm(x, norm, step.addends.pop(source, None))
    return rms_norm(x.view(len(x), -1, op.norm.size), norm).view_as(x)


def _project(op: Project, step: Step) -> Tensor:
    x, linear, lora = step.values[op.inputs[0]], step.weights.projections[op.group], step.lora
    if lora is not None and op.reader_adds:
        made = lora.beside(op.group, x, linear)
        if made is not None:
            out, step.addends[op.out] = made
            return out
    if lora is not None and op.projection.in_cut is not None:
        summed = lora.before_sum(op.group, x, linear)
        if summed is not None:
            return summed
    out = linear.in_fp32(x) if op.out.is_wide else linear(x)
    if lora is not None:
        lora.add(op.group, x, out, linear.bias)
    return out


def _rotate_and_store(op: RotateAndStore, step: Step) -> Tensor:
    attention, qkv = op.attention, step.values[op.out]
    rotation: Rotation = _NO_ROTATION if op.angles is None else step.values[op.angles]
    cache, layer = step.kv_caches.of(op.of_layer)
    rotate_and_store(
        qkv,
        cache,
        layer,
        step.inputs.attention.cells,
        rotation.cos,
        rotation.sin,
        _head_norms(op, step),
        num_heads=attention.num_heads,
        is_interleaved=attention.rope is not None and attention.rope.is_interleaved,
        q_scale=None if op.growth is None else step.values[op.growth],
        addend=step.addends.pop(op.out, None),
    )
    assert isinstance(qkv, Tensor)
    return qkv


def _head_norms(op: RotateAndStore, step: Step) -> HeadNorms:
    attention, norms = op.attention, step.weights.head_norms(op.attention, op.layer)
    if step.lora is None:
        return norms
    of_heads = (attention.q_norm, attention.k_norm, attention.v_norm)
    found = (step.norm(each, op.layer, Rows.TOKENS) for each in of_heads)
    q, k, v = (None if each is None else each.weight for each in found)
    return norms._replace(q=q, k=k, v=v)


def _attend(op: Attend, step: Step) -> Tensor:
    attention = op.attention
    cache, layer = step.kv_caches.of(op.of_layer)
    qkv, plan = step.values[op.inputs[0]], step.inputs.attention
    mixed = attend(
        qkv[:, : attention.q_size].unflatten(1, (-1, attention.head_dim)),
        cache,
        layer,
        plan.looking_back if attention.only_looks_back else plan,
        scale=attention.scale,
        window=attention.window,
        softcap=attention.softcap,
        sinks=step.weights.numbers_of(op.sinks),
    )
    return mixed.flatten(1)


def _columns(ops: Sequence[Op], device: torch.device) -> Mapping[Op, Tensor]:
    """Returns where each column of the output comes from, int64 [width], of each operation that
    copies columns: made once, because recorded steps have their addresses."""
    by_runs: dict[tuple[Run, ...], Tensor] = {}
    for op in ops:
        if isinstance(op, Regroup) and op.runs not in by_runs:
            found = torch.empty(op.out.width, dtype=torch.int64)
            for source, target, length in op.runs:
                found[target : target + length] = torch.arange(source, source + length)
            by_runs[op.runs] = found.to(device)
    return {op: by_runs[op.runs] for op in ops if isinstance(op, Regroup)}


def _regroup(op: Regroup, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    return x.index_select(1, step.columns[op])


def _gate_heads(op: GateHeads, step: Step) -> Tensor:
    mixed, gate = (step.values[each] for each in op.inputs)
    return gate_heads(mixed, gate)


def _gate(op: Gate, step: Step) -> Tensor:
    first, *others = op.inputs
    if others:
        gate, up = step.values[first], step.values[others[0]]
        if op.part is not None:
            up = up.unflatten(1, (-1, op.out.width))[:, op.part]
    else:
        gate, up = step.values[first].chunk(2, dim=-1)
    if isinstance(op.activation, ClampedSwiglu):
        return clamped_swiglu(gate, up, op.activation.alpha, op.activation.limit)
    return _GATED[op.activation](gate, up, step.addends.pop(first, None))


def _route(op: Route, step: Step) -> Routed:
    experts, weights = op.experts, step.weights
    routing = route(
        step.values[op.inputs[0]],
        experts.router.choice,
        weights.numbers_of(op.bias),
        weights.numbers_of(op.expert_scales),
        out=step.choices.get(op.of_layer),
    )
    order = step.token_order
    tokens = None if order is None else order.tokens
    pairs = sort_pairs(routing.experts, experts.num_experts, tokens)
    if experts.cut is not None:
        pairs = own_pairs(pairs, experts.cut.range)
    lora = None
    if step.lora is not None and order is not None:
        lora = step.lora.of_pairs(order, routing.experts, pairs)
    return Routed(routing, pairs, lora)


def _spread(op: Spread, step: Step) -> Tensor:
    x, routed = (step.values[each] for each in op.inputs)
    return x.index_select(0, routed.pairs.tokens)


def _project_experts(op: ProjectExperts, step: Step) -> Tensor:
    x, routed = (step.values[each] for each in op.inputs)
    projection, linear = op.projection, step.weights.projections[op.group]
    sizes = projection.num_experts, projection.out_features
    out = linear.of_experts(x, routed.pairs, *sizes)
    if routed.lora is not None:
        routed.lora.add(op.group, x, out)
    return out


def _combine(op: Combine, step: Step) -> Tensor:
    made, routed = (step.values[each] for each in op.inputs[:2])
    shared, gate = (None if each is None else step.values[each] for each in (op.shared, op.gate))
    return combine(made, routed.pairs, routed.routing.weights, shared, gate)


def _logits(op: Logits, step: Step) -> Tensor:
    head, lora, normed = op.head, step.lora, step.values[op.inputs[0]]
    logits = step.weights.projections[HEAD_KEY](normed)
    if op.cut is not None:
        logits = ranks_in_torch.gather_logits(logits, op, step.ranks)
        if op.cut.start:
            return logits  # the first rank's are used, and adapters add to these alone
    if lora is None:
        return bound_logits(logits, head.scale, head.softcap)
    if lora.num_added_tokens:
        logits = F.pad(logits, (0, lora.num_added_tokens), value=float("-inf"))
    lora.add_head(normed, logits)
    bounded = bound_logits(logits, head.scale, head.softcap)
    # A cap would make numbers of absent tokens.
    absent = logits.isneginf() if lora.num_added_tokens and head.softcap else None
    return bounded if absent is None else bounded.masked_fill_(absent, float("-inf"))


COMPUTE: dict[type[Op], Callable[[Any, Step], object]] = {
    AddNorm: _add_norm,
    Angles: _angles,
    Attend: _attend,
    Combine: _combine,
    Embed: _embed,
    Gate: _gate,
    GateHeads: _gate_heads,
    Growth: _growth,
    Logits: _logits,
    NormOf: _norm_of,
    Project: _project,
    ProjectExperts: _project_experts,
    Regroup: _regroup,
    RotateAndStore: _rotate_and_store,
    Route: _route,
    Scale: _scale,
    Spread: _spread,
    **encoder_in_torch.COMPUTE,
    **mixers_in_torch.COMPUTE,
    **ranks_in_torch.COMPUTE,
}
"""The function that computes each kind of operation, and returns what it writes."""
