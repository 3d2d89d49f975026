"""Makes the native operations of a step: each of `model.operations` as one or a few in C++, with
adapters' operations beside them.

An operation comes with the group of adapters that it is part of: "" always runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from inference_svc.adapters.layout import EMBEDDING, HEAD
from inference_svc.backends.native.adapter_ops import (
    WITHOUT,
    AdapterOps,
    GroupedOp,
    head_norms,
    heads_normed,
)
from inference_svc.backends.native.attention import NativeAttentions
from inference_svc.backends.native.buffers import StepMemory
from inference_svc.backends.native.encoder import MAKE_ENCODERS, EncoderOps, Tensors, angles_of
from inference_svc.backends.native.exchange import ProgramExchange
from inference_svc.backends.native.projections import PackedProjection, experts_ops, project_ops
from inference_svc.backends.native.states import NativeStates
from inference_svc.backends.native.towers.operations import MAKE_TOWERS
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD, Activation, ClampedSwiglu
from inference_svc.model.encoder.operations import ArrangeHeads
from inference_svc.model.mixers.gated_delta import Convolve, DeltaRule, GatedNorm
from inference_svc.model.mixers.short_conv import GatedConvolve
from inference_svc.model.operations import (
    HEAD_KEY,
    AddNorm,
    Angles,
    Attend,
    Combine,
    Embed,
    Gate,
    GateHeads,
    Gather,
    Growth,
    HandOn,
    Logits,
    NormBySums,
    NormOf,
    Op,
    Project,
    ProjectExperts,
    Receive,
    Regroup,
    RotateAndStore,
    Route,
    Rows,
    Scale,
    Spread,
    SumRanks,
    SumSquares,
    Value,
)
from inference_svc.model.transformer import as_held
from kernels.attention.native import query_growth_op, rope_and_store_op, rotary_angles_op
from kernels.elementwise import (
    NormWeight,
    clamped_swiglu_op,
    exact_geglu_op,
    gather_op,
    geglu_op,
    norm_by_sum_op,
    rms_norm_op,
    scale_rows_op,
    sum_squares_op,
    swiglu_op,
)
from kernels.experts.native import (
    PairsBuffer,
    combine_op,
    route_op,
    sort_pairs_op,
)
from kernels.native.library import NativeOp
from kernels.pictures.native import arrange_heads_op
from kernels.quantised.native import Int8Inputs
from kernels.recurrence.native import (
    StateRows,
    causal_conv_op,
    copy_runs_op,
    delta_rule_op,
    gate_heads_op,
    gated_conv_op,
    gated_norm_op,
)

_GATED = {
    Activation.SILU: swiglu_op,
    Activation.GELU_TANH: geglu_op,
    Activation.GELU: exact_geglu_op,
}


@dataclass(frozen=True, slots=True)
class NativeOps:
    """Makes operations over fixed memory: the `step` that they read, and the `logits` that they
    write, fp32 [N, at least vocab_size]. `int8_inputs` is for products of inputs in int8;
    `routings` has the routing of each layer with experts; `exchange` makes those in which ranks of
    a model that is cut exchange."""

    weights: ModelWeights[PackedProjection]
    step: StepMemory
    logits: Tensor
    int8_inputs: Int8Inputs
    adapters: AdapterOps
    encoder: EncoderOps
    attention: NativeAttentions | None = None
    states: NativeStates | None = None
    routings: Mapping[int, PairsBuffer] = field(default_factory=dict)
    exchange: ProgramExchange | None = None

    def make(self, ops: Sequence[Op], tensors: Iterable[Tensors]) -> Iterator[GroupedOp]:
        """Yields the operations that compute `ops`, whose values are these tensors, by
        operation."""
        for op, at in zip(ops, tensors, strict=True):
            yield from _MAKE[type(op)](self, op, at)

    def count(self, value: Value) -> Tensor:
        """Returns where the step has the number of rows, int32 [1], of a value."""
        return self.step.count(value.rows)

    def embed(self, op: Embed, at: Tensors) -> Iterator[GroupedOp]:
        out, token_ids = at[op.out], self.step.token_ids
        table, cut, count = self.weights.tables[op.table.key], op.table.cut, self.count(op.out)
        if cut is None:
            yield "", gather_op(table, out, token_ids, count)
        else:  # a token's row is of one rank, and zero on all others
            yield "", gather_op(table, out, token_ids, count, first_row=cut.start)
            yield "", self.program_exchange.sum_op(out, count)
        if op.is_adapted:
            replaced = self.adapters.replace_embeddings(token_ids, out)
            yield from _of_group(EMBED_TOKENS, replaced)
            yield from _of_group(EMBEDDING, self.adapters.add_embedding(token_ids, out))

    def scale(self, op: Scale, at: Tensors) -> Iterator[GroupedOp]:
        x = at[op.out]
        scale = as_held(op.scale, x.dtype) if op.is_rounded else op.scale
        yield "", scale_rows_op(x, self.count(op.out), scale=scale)

    def angles(self, op: Angles, at: Tensors) -> Iterator[GroupedOp]:
        frequencies = op.rope.inverse_frequencies(op.head_dim)
        cos, sin = angles_of(at[op.out])
        positions, axes = self.step.positions_along(op.rope.axes)
        count, scaling = self.count(op.out), op.rope.attention_scaling
        yield "", rotary_angles_op(positions, frequencies, cos, sin, count, axes, scaling=scaling)

    def growth(self, op: Growth, at: Tensors) -> Iterator[GroupedOp]:
        scale = at[op.out].view(-1)
        count = self.count(op.out)
        yield "", query_growth_op(self.step.positions, scale, count, **op.growth._asdict())

    def gather(self, op: Gather, at: Tensors) -> Iterator[GroupedOp]:
        source = _part(at[op.inputs[0]], op.part, op.out.width)
        yield "", gather_op(source, at[op.out], self.step.logit_rows, self.count(op.out))

    def add_norm(self, op: AddNorm, at: Tensors) -> Iterator[GroupedOp]:
        hidden, delta = at[op.hidden], None if op.delta is None else at[op.delta]
        assert op.hidden.rows is op.out.rows, "gathered before"

        def norm_op(made: NormWeight | None) -> NativeOp:
            return rms_norm_op(
                hidden,
                delta,
                None if made is None else made.weight,
                at[op.out],
                self.count(op.out),
                eps=0.0 if made is None else made.eps,
                delta_scale=op.delta_scale,
                sum_scale=self.weights.scale(op.sum_scale),
                is_centred=made is not None and made.is_centred,
                bias=None if made is None else made.bias,
            )

        weight = self.weights.norm(op.norm, op.layer)
        if op.norm is None or weight is None:
            yield "", norm_op(None)
        else:
            yield from self.normed(op.norm.path(op.layer), weight, norm_op, op.out)

    def norm_of(self, op: NormOf, at: Tensors) -> Iterator[GroupedOp]:
        size = op.norm.size
        x, out = (at[each].view(-1, size) for each in (op.inputs[0], op.out))

        def norm_op(made: NormWeight) -> NativeOp:
            return rms_norm_op(
                x,
                None,
                made.weight,
                out,
                self.count(op.out),
                eps=made.eps,
                is_centred=made.is_centred,
                bias=made.bias,
                rows_per_count=op.out.width // size,
            )

        weight = self.weights.norm(op.norm, op.layer)
        assert weight is not None
        yield from self.normed(op.norm.path(op.layer), weight, norm_op, op.out)

    def normed(
        self,
        module: str,
        weight: NormWeight,
        norm_op: Callable[[NormWeight], NativeOp],
        out: Value,
    ) -> Iterator[GroupedOp]:
        """Yields the operation of a norm, and those with weights of tokens that stand in for it."""
        own = self.adapters.token_weights(module, weight, out.rows)
        if own is None:
            yield "", norm_op(weight)
            return
        yield WITHOUT + module, norm_op(weight)
        yield from _of_group(module, [*own[0], norm_op(own[1])])

    def project(self, op: Project, at: Tensors) -> Iterator[GroupedOp]:
        x, out, linear = at[op.inputs[0]], at[op.out], self.weights.projections[op.group]
        yield from _of_group("", project_ops(x, linear, out, self.count(op.out), self.int8_inputs))
        yield from self.adapters.add(op.group, x, out, linear.bias, op.out.rows)

    def rotate_and_store(self, op: RotateAndStore, at: Tensors) -> Iterator[GroupedOp]:
        attention, norms = op.attention, self.weights.head_norms(op.attention, op.layer)
        cos, sin = (None, None) if op.angles is None else angles_of(at[op.angles])
        cache, layer = self.attentions.cache_of(op)

        def store_op(q: Tensor | None, k: Tensor | None, v: Tensor | None) -> NativeOp:
            return rope_and_store_op(
                at[op.out],
                cache,
                layer,
                cos,
                sin,
                self.step.rows,
                norms._replace(q=q, k=k, v=v),
                num_heads=attention.num_heads,
                is_interleaved=attention.rope is not None and attention.rope.is_interleaved,
                q_scale=None if op.growth is None else at[op.growth].view(-1),
            )

        of_heads = (attention.q_norm, attention.k_norm, attention.v_norm)
        found = [(each, self.weights.norm(each, op.layer)) for each in of_heads]
        yield from heads_normed(self.adapters, found, op.layer, store_op)

    def attend(self, op: Attend, at: Tensors) -> Iterator[GroupedOp]:
        sinks = self.weights.numbers_of(op.sinks)
        yield "", self.attentions.attend_op(op, at[op.inputs[0]], at[op.out], sinks)

    def regroup(self, op: Regroup, at: Tensors) -> Iterator[GroupedOp]:
        yield "", copy_runs_op(at[op.inputs[0]], at[op.out], self.count(op.out), op.runs)

    def gate_heads(self, op: GateHeads, at: Tensors) -> Iterator[GroupedOp]:
        yield "", gate_heads_op(at[op.out], at[op.inputs[1]], self.count(op.out))

    def gate(self, op: Gate, at: Tensors) -> Iterator[GroupedOp]:
        first, *others = (at[each] for each in op.inputs)
        gate, up = (first, _part(others[0], op.part, op.out.width)) if others else _halves(first)
        count = self.count(op.out)
        if op.out.rows is Rows.PAIRS:
            count = self._routing(op).num_pairs
        activation = op.activation
        if isinstance(activation, ClampedSwiglu):
            bounds = {"alpha": activation.alpha, "limit": activation.limit}
            yield "", clamped_swiglu_op(gate, up, at[op.out], count, **bounds)
        else:
            yield "", _GATED[activation](gate, up, at[op.out], count)

    def route(self, op: Route, at: Tensors) -> Iterator[GroupedOp]:
        routing, count = self._routing(op), self.count(op.out)
        vectors = (self.weights.numbers_of(each) for each in (op.bias, op.expert_scales))
        choice = op.experts.router.choice
        yield "", route_op(at[op.inputs[0]], choice, routing, count, *vectors)
        cut = op.experts.cut
        yield "", sort_pairs_op(routing, count, 0 if cut is None else cut.start)

    def spread(self, op: Spread, at: Tensors) -> Iterator[GroupedOp]:
        routing = self._routing(op)
        tokens, count = routing.pairs.tokens, routing.num_pairs
        yield "", gather_op(at[op.inputs[0]], at[op.out], tokens, count)

    def project_experts(self, op: ProjectExperts, at: Tensors) -> Iterator[GroupedOp]:
        routing, linear = self._routing(op), self.weights.projections[op.group]
        x, out = at[op.inputs[0]], at[op.out]
        yield from _of_group("", experts_ops(x, linear, out, routing, self.int8_inputs))
        ops = self.adapters.add_experts(op.group, x, out, routing.pairs, op.inputs[1].rows)
        yield from _of_group(op.group, ops)

    @property
    def attentions(self) -> NativeAttentions:
        """The attention of a model that has it."""
        assert self.attention is not None, "the model has no attention to stored keys"
        return self.attention

    @property
    def program_exchange(self) -> ProgramExchange:
        """The exchange with other ranks, of a model that is cut or has stages."""
        assert self.exchange is not None, "the model is not cut"
        return self.exchange

    def combine(self, op: Combine, at: Tensors) -> Iterator[GroupedOp]:
        routing, count = self._routing(op), self.count(op.out)
        shared, gate = (None if each is None else at[each] for each in (op.shared, op.gate))
        yield "", combine_op(at[op.inputs[0]], routing, at[op.out], count, shared, gate)

    def _routing(self, op: Op) -> PairsBuffer:
        assert op.layer is not None
        return self.routings[op.layer]

    def of_logits(self, op: Logits, at: Tensors) -> Iterator[GroupedOp]:
        normed, logits, count = at[op.inputs[0]], self.logits, self.count(op.out)
        linear, cut = self.weights.projections[HEAD_KEY], op.cut
        whole = logits[:, : op.out.width]
        own = whole if cut is None else whole[:, cut.start : cut.end]
        yield from _of_group("", project_ops(normed, linear, own, count, self.int8_inputs))
        if cut is not None:
            yield "", self.program_exchange.columns_op(whole, count, op.part_size)
            if cut.start:
                return  # the first rank's are used, and adapters add to these alone
        yield from _of_group(LM_HEAD, self.adapters.replace_logits(normed, logits))
        yield from self.adapters.add(HEAD, normed, logits, None, Rows.LOGITS)
        head = op.head
        if head.scale != 1.0 or head.softcap is not None:
            yield "", scale_rows_op(logits, count, scale=head.scale, softcap=head.softcap)


def _convolve(ops: NativeOps, op: Convolve, at: Tensors) -> Iterator[GroupedOp]:
    size, weight = op.mixer.conv_size, ops.weights.numbers_of(op.kernels)
    assert weight is not None
    rows, (states, _) = _states(ops, op)
    x = at[op.inputs[0]][:, :size]
    yield "", causal_conv_op(x, at[op.out], weight.view(size, -1), states, rows)


def _gated_convolve(ops: NativeOps, op: GatedConvolve, at: Tensors) -> Iterator[GroupedOp]:
    weight = ops.weights.numbers_of(op.kernels)
    assert weight is not None
    rows, (states,) = _states(ops, op)
    kernels = weight.view(op.mixer.num_channels, -1)
    yield "", gated_conv_op(at[op.inputs[0]], at[op.out], kernels, states, rows)


def _delta_rule(ops: NativeOps, op: DeltaRule, at: Tensors) -> Iterator[GroupedOp]:
    mixer, (rows, (_, states)) = op.mixer, _states(ops, op)
    qkv, made = (at[each] for each in op.inputs)
    rate, bias = (ops.weights.numbers_of(each) for each in (op.decay, op.decay_bias))
    assert rate is not None
    assert bias is not None
    *_, b, a = made.split(mixer.parts, dim=1)
    yield "", delta_rule_op(qkv, b, a, at[op.out], -rate.exp(), bias, states, rows, mixer.heads)


def _gated_norm(ops: NativeOps, op: GatedNorm, at: Tensors) -> Iterator[GroupedOp]:
    norm, weight = op.mixer.norm, ops.weights.norm(op.mixer.norm, op.layer)
    x, made = at[op.out], at[op.inputs[1]]
    assert weight is not None
    _, z, *_ = made.split(op.mixer.parts, dim=1)

    def norm_op(given: NormWeight) -> NativeOp:
        return gated_norm_op(x, z, given.weight, ops.count(op.out), eps=given.eps)

    yield from ops.normed(norm.path(op.layer), weight, norm_op, op.out)


def _receive(ops: NativeOps, op: Receive, at: Tensors) -> Iterator[GroupedOp]:
    x, count = _whole(ops, op, at), ops.count(op.out)
    yield "", ops.program_exchange.receive_op(x, count, op.stage)


def _hand_on(ops: NativeOps, op: HandOn, at: Tensors) -> Iterator[GroupedOp]:
    x, count = _whole(ops, op, at), ops.count(op.out)
    yield "", ops.program_exchange.send_op(x, count, op.stage)


def _whole(ops: NativeOps, op: Op, at: Tensors) -> Tensor:
    """Returns a value that stages hand on: of logits with the columns of tokens that adapters may
    add, as the other stage does not know whether any has."""
    return ops.logits if op.out.rows is Rows.LOGITS else at[op.out]


def _sum_ranks(ops: NativeOps, op: SumRanks, at: Tensors) -> Iterator[GroupedOp]:
    yield "", ops.program_exchange.sum_op(at[op.out], ops.count(op.out))


def _sum_squares(ops: NativeOps, op: SumSquares, at: Tensors) -> Iterator[GroupedOp]:
    x, out, count = at[op.inputs[0]], at[op.out], ops.count(op.out)
    for index, each in enumerate(op.normed):
        yield "", sum_squares_op(x[:, each.range], out[:, index], count)


def _norm_by_sums(ops: NativeOps, op: NormBySums, at: Tensors) -> Iterator[GroupedOp]:
    x, sums = (at[each] for each in op.inputs)
    for index, each in enumerate(op.normed):
        columns, of_columns = x[:, each.range], sums[:, index]
        num_summed = each.norm.size * op.num_ranks

        def norm_op(
            made: NormWeight,
            columns: Tensor = columns,
            of_columns: Tensor = of_columns,
            num_summed: int = num_summed,
        ) -> NativeOp:
            count = ops.count(op.out)
            return norm_by_sum_op(
                columns, made.weight, made.eps, of_columns, count, num_summed=num_summed
            )

        path, weight = each.norm.path(op.layer), ops.weights.norm(each.norm, op.layer)
        assert weight is not None
        own = ops.adapters.token_weights(path, weight, Rows.TOKENS)
        if own is None:
            yield "", norm_op(weight)
            continue
        group = head_norms(path)
        yield WITHOUT + group, norm_op(weight)
        yield from _of_group(group, [*own[0], norm_op(own[1])])


def _states(ops: NativeOps, op: Op) -> tuple[StateRows, tuple[Tensor, ...]]:
    """Returns the step's rows of states, and the states of an operation's layer."""
    assert ops.states is not None, "the model has recurrent layers"
    return ops.states.rows, ops.states.memory.layers[op.of_layer]


def _arrange_heads(ops: NativeOps, op: ArrangeHeads, at: Tensors) -> Iterator[GroupedOp]:
    mixer, count = op.mixer, ops.count(op.out)

    def norm_op(*weights: Tensor) -> NativeOp:
        return arrange_heads_op(
            at[op.out],
            weights,
            count,
            head_dim=mixer.head_dim,
            eps=op.norms[0].eps,
            quarters=mixer.quarters,
        )

    found = [(each, ops.weights.norm(each, op.layer)) for each in op.norms]
    yield from heads_normed(ops.adapters, found, op.layer, norm_op)


def _of_encoder(make: Callable[..., Iterator[GroupedOp]]) -> Callable[..., Iterator[GroupedOp]]:
    return lambda ops, op, at: make(ops.encoder, op, at)


_MAKE: Mapping[type[Op], Callable[[NativeOps, Any, Tensors], Iterator[GroupedOp]]] = {
    AddNorm: NativeOps.add_norm,
    Angles: NativeOps.angles,
    Attend: NativeOps.attend,
    Combine: NativeOps.combine,
    Embed: NativeOps.embed,
    Gate: NativeOps.gate,
    GateHeads: NativeOps.gate_heads,
    Gather: NativeOps.gather,
    Growth: NativeOps.growth,
    Logits: NativeOps.of_logits,
    NormOf: NativeOps.norm_of,
    Project: NativeOps.project,
    ProjectExperts: NativeOps.project_experts,
    Regroup: NativeOps.regroup,
    RotateAndStore: NativeOps.rotate_and_store,
    Route: NativeOps.route,
    Scale: NativeOps.scale,
    Spread: NativeOps.spread,
    Convolve: _convolve,
    DeltaRule: _delta_rule,
    GatedConvolve: _gated_convolve,
    GatedNorm: _gated_norm,
    HandOn: _hand_on,
    NormBySums: _norm_by_sums,
    Receive: _receive,
    SumRanks: _sum_ranks,
    SumSquares: _sum_squares,
    ArrangeHeads: _arrange_heads,
    **{kind: _of_encoder(make) for kind, make in (*MAKE_ENCODERS.items(), *MAKE_TOWERS.items())},
}
"""The function that makes each kind of operation."""


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=1)
    return first, second


def _part(x: Tensor, part: int | None, width: int) -> Tensor:
    return x if part is None else x.unflatten(1, (-1, width))[:, part]


def _of_group(group: str, ops: Iterable[NativeOp]) -> Iterator[GroupedOp]:
    return ((group, op) for op in ops)
