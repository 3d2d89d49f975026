"""The one walk over a decoder: lists the operations of a step, in the order in which they run.

Rounding follows from the order, so that every backend computes the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from inference_svc.model.description import (
    EMBED_TOKENS,
    LM_HEAD,
    Attention,
    Block,
    BothWays,
    Cut,
    Decoder,
    Dense,
    Experts,
    ExpertsProjection,
    LayerInput,
    LayerInputs,
    Member,
    Norm,
    Projection,
    QueryGrowth,
    layer_path,
)
from inference_svc.model.encoder.clips import list_product
from inference_svc.model.encoder.operations import list_activation, list_attention, list_inputs
from inference_svc.model.encoder.towers import (
    PlacePictures,
    has_taps,
    list_outputs,
    list_patches,
    list_taps,
)
from inference_svc.model.mixers import gated_delta, short_conv
from inference_svc.model.operations import (
    EMBEDDING_KEY,
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
    NormOf,
    Op,
    Operations,
    Project,
    ProjectExperts,
    Receive,
    Regroup,
    RotateAndStore,
    Route,
    Rows,
    Run,
    Scalar,
    Scale,
    Spread,
    SumRanks,
    Table,
    Value,
    Weight,
    weight_key,
)
from inference_svc.model.rope import Rope
from inference_svc.model.sharding.norms import norm_all_heads


class Narrowing(enum.Enum):
    """The place from which on a step computes only the tokens that get logits: the last norm
    chooses them, or operations before it do, or after the mixer of the last layer."""

    IN_LAST_NORM = enum.auto()
    BEFORE_HEAD = enum.auto()
    IN_LAST_LAYER = enum.auto()


@lru_cache(maxsize=8)
def operations(decoder: Decoder, narrowing: Narrowing = Narrowing.IN_LAST_NORM) -> Operations:
    """Returns the operations of a step."""
    walk = Walk(decoder, narrowing)
    layers = tuple(walk.layers())
    return Operations(layers, tuple(walk.head()))


@lru_cache(maxsize=4)
def weights_of(decoder: Decoder) -> tuple[Weight, ...]:
    """Returns the weights that operations read, each once, in order of use."""
    found = operations(decoder)
    read: dict[str, Weight] = {}
    for op in (*found.layers, *found.head):
        for weight in op.weights:
            read.setdefault(weight_key(weight), weight)
    return tuple(read.values())


def layer_projections(decoder: Decoder) -> Iterator[Projection | ExpertsProjection]:
    """Yields the projections of all layers, in order of use."""
    for spec, layer in weights_of(decoder):
        if layer is not None and isinstance(spec, Projection | ExpertsProjection):
            yield spec


class Walk:
    """The state of a walk: the residual stream, and the delta that the next norm adds to it."""

    def __init__(self, decoder: Decoder, narrowing: Narrowing) -> None:
        self._decoder = decoder
        self._narrowing = narrowing
        self._rows = Rows.TOKENS
        self._values: dict[tuple[str, int, Rows, bool], Value] = {}
        self._hidden = self.value("hidden", decoder.hidden_size)
        self._delta: Value | None = None
        self._delta_scale = 1.0
        self._sum_scale: float | Scalar = 1.0
        self.angles: dict[tuple[Rope, int], Value] = {}
        self._growths: dict[QueryGrowth, Value] = {}
        self._layer_inputs: Value | None = None
        self.ops: list[Op] = []

    def value(
        self, name: str, width: int, rows: Rows | None = None, *, is_wide: bool = False
    ) -> Value:
        """Returns the value of this name and form, of the rows that are left unless it says other
        ones."""
        key = name, width, self._rows if rows is None else rows, is_wide
        if key not in self._values:
            self._values[key] = Value(*key)
        return self._values[key]

    def layers(self) -> list[Op]:
        """Walks all layers."""
        decoder, self.ops = self._decoder, []
        stage = decoder.stage
        if stage is None or stage.is_first:
            self._embed()
        else:
            self.ops.append(Receive((), self._hidden, None, stage.index - 1))
        self._of_positions()
        for layer in decoder.layers:
            self._block(layer, decoder.blocks[layer])
            if has_taps(decoder, layer):
                self._add()
                list_taps(self, self._hidden, decoder, layer)
        if stage is not None and not stage.is_last:
            self._add()
            self.ops.append(HandOn((self._hidden,), self._hidden, None, stage.index + 1))
        return self.ops

    def _embed(self) -> None:
        decoder = self._decoder
        if decoder.patches is not None:
            list_patches(self, self._hidden, decoder.patches)
        else:
            self.ops.append(Embed((), self._hidden, None, _table(decoder), is_adapted=True))
        if decoder.embedding_scale != 1.0:
            _scale(self, self._hidden, decoder.embedding_scale, is_rounded=True)
        if decoder.pictures is not None:
            self.ops.append(PlacePictures((self._hidden,), self._hidden, None))
        if decoder.layer_inputs is not None:
            self._of_all_layers(decoder.layer_inputs)
        if decoder.encoder is not None:
            list_inputs(self, self._hidden, decoder.encoder)

    def head(self) -> list[Op]:
        """Walks the last norm and the head. Of several stages the first rank of the last one hands
        the logits to the first rank of all; others have none."""
        self.ops = []
        stage, is_first_rank = self._decoder.stage, self._decoder.is_first_rank
        if stage is None or stage.is_last:
            logits = self._logits()
            if stage is not None and is_first_rank:
                self.ops.append(HandOn((logits,), logits, None, 0))
        elif stage.is_first and is_first_rank:
            logits = self.value("logits", self._decoder.vocab_size, Rows.LOGITS)
            self.ops.append(Receive((), logits, None, stage.count - 1))
        return self.ops

    def _logits(self) -> Value:
        """The logits; of an encoder the hidden states that are its outputs."""
        decoder = self._decoder
        if self._narrowing is Narrowing.BEFORE_HEAD:
            self._rows = Rows.LOGITS
            self._hidden = self._gathered(self._hidden)
            self._delta = None if self._delta is None else self._gathered(self._delta)
        if decoder.final_norm is None:
            self._add()
            is_narrow, self._rows = self._rows is Rows.LOGITS, Rows.LOGITS
            normed = self._hidden if is_narrow else self._gathered(self._hidden)
        else:
            normed = self.value("last_normed", decoder.hidden_size, Rows.LOGITS)
            self._add_norm(decoder.final_norm, normed, None)
        if decoder.connector is not None:
            return list_outputs(self, normed, decoder)
        if decoder.encoder is not None:
            return normed
        cut = _vocab_cut(decoder)
        num_rows = decoder.vocab_size if cut is None else cut.size
        projection = Projection(
            HEAD_KEY,
            (Member(LM_HEAD, num_rows, cuts=() if cut is None else (cut,)),),
            decoder.hidden_size,
            formats=(decoder.head.format,),
        )
        logits = self.value("logits", decoder.vocab_size, Rows.LOGITS)
        size = 0 if decoder.rank is None else decoder.rank.part_size(decoder.vocab_size)
        table = None if decoder.has_embedding else _table(decoder)
        self.ops.append(Logits((normed,), logits, None, decoder.head, projection, size, table))
        return logits

    def _of_all_layers(self, described: LayerInputs) -> None:
        """The per-layer inputs, of all layers side by side."""
        own = self.value("own_inputs", described.total_size)
        sizes, copies = (described.vocab_size, own.width), described.of_padding
        table = Table("layer_embedding", described.embedding, *sizes, copies=copies)
        self.ops.append(Embed((), own, None, table))
        _scale(self, own, described.embedding_scale, is_rounded=True)
        made = self._layer_inputs = self.value("layer_inputs", own.width)
        self.ops.append(Project((self._hidden,), made, None, described.projection))
        _scale(self, made, described.projection_scale, is_rounded=False)
        self._norm_of(made, described.norm, None)
        self.ops.append(AddNorm((made, own), made, None, None, sum_scale=described.scale))

    def _of_positions(self) -> None:
        """The values that follow from positions alone."""
        for index, (rope, head_dim) in enumerate(self._decoder.ropes):
            out = self.value(f"angles_{index}", rope.rotary_size(head_dim))
            self.angles[rope, head_dim] = out
            self.ops.append(Angles((), out, None, rope, head_dim))
        for index, growth in enumerate(self._decoder.query_growths):
            out = self._growths[growth] = self.value(f"growth_{index}", 1)
            self.ops.append(Growth((), out, None, growth))

    def _block(self, layer: int, block: Block) -> None:
        """A layer: each half reads a norm of the stream, and leaves a delta to it."""
        x = self._normed(block.attention_norm, layer)
        mixed = MIXERS[type(block.mixer)](self, layer, block.mixer, x)
        is_last = layer == self._decoder.num_layers - 1
        if is_last and self._narrowing is Narrowing.IN_LAST_LAYER:
            mixed, x = self._narrow(mixed, x if block.is_parallel else None)
        delta = self.value("delta", self._decoder.hidden_size)
        adds = block.attention_post_norm is not None or block.feed_forward_norm is not None
        out = block.mixer.out
        is_whole = out.in_cut is None
        list_product(self, mixed, delta, layer, out, reader_adds=adds and is_whole)
        _sum_ranks(self, delta, layer, is_whole=is_whole)
        scale = block.residual_scale
        self._leave(delta, block.attention_post_norm, scale, layer, block.attention_sum_norm)
        if block.is_parallel:
            self._add()
        else:
            x = self._normed(block.feed_forward_norm, layer)
        self._feed_forward(layer, block, x)
        self._leave(delta, block.feed_forward_post_norm, scale, layer, block.feed_forward_sum_norm)
        if block.layer_input is not None:
            self._add()
            self._layer_input(layer, block.layer_input)
            self._leave(delta, block.layer_input_post_norm, 1.0, layer)
        if block.scalar:
            self._sum_scale = Scalar(layer_path(layer, block.scalar), layer)

    def attend(self, layer: int, attention: Attention, x: Value) -> Value:
        """Attention up to its last projection."""
        qkv = self.value("qkv", attention.qkv.out_features)
        adds = not (attention.norms_all_heads or attention.has_gate)
        self.ops.append(Project((x,), qkv, layer, attention.qkv, reader_adds=adds))
        rope, growth = attention.rope, attention.query_growth
        angles = None if rope is None else self.angles[rope, attention.head_dim]
        grown = None if growth is None else self._growths[growth]
        gate = None
        if attention.has_gate:
            # Each query has its gate behind it; keys and values follow.
            size, all_queries = attention.head_dim, attention.q_size
            heads = (2 * size * head for head in range(attention.num_heads))
            queries = [Run(at, at // 2, size) for at in heads]
            gates = tuple(run._replace(source=run.source + size) for run in queries)
            tail = Run(2 * all_queries, all_queries, 2 * attention.kv_size)
            gate = self.regroup(layer, qkv, "head_gates", gates)
            qkv = self.regroup(layer, qkv, "heads", (*queries, tail))
        inputs = tuple(each for each in (qkv, angles, grown) if each is not None)
        of_heads = norm_all_heads(self, self._decoder.rank, layer, attention, qkv)
        self.ops.append(RotateAndStore(inputs, qkv, layer, of_heads, angles, grown))
        mixed = self.value("mixed", attention.q_size)
        self.ops.append(Attend((qkv,), mixed, layer, attention))
        if gate is not None:
            self.ops.append(GateHeads((mixed, gate), mixed, layer))
        return mixed

    def regroup(self, layer: int, x: Value, name: str, runs: tuple[Run, ...]) -> Value:
        """Copies runs of columns to a value of this name."""
        out = self.value(name, sum(run.length for run in runs))
        self.ops.append(Regroup((x,), out, layer, runs))
        return out

    def _narrow(self, mixed: Value, x: Value | None) -> tuple[Value, Value]:
        """Goes on with the tokens that get logits: the others are done."""
        self._rows = Rows.LOGITS
        self._hidden, mixed = self._gathered(self._hidden), self._gathered(mixed)
        return mixed, self._hidden if x is None else self._gathered(x)

    def _gathered(self, value: Value) -> Value:
        out = self.value(value.name, value.width)
        self.ops.append(Gather((value,), out, None))
        return out

    def _feed_forward(self, layer: int, block: Block, x: Value) -> None:
        """Writes the half's output to the delta."""
        if block.dense is not None:
            adds = block.experts is None and _next_is_normed(self._decoder, layer, block)
            delta, is_whole = self._dense(layer, block.dense, x, reader_adds=adds)
            if block.experts is None or block.experts.shared_post_norm is not None:
                _sum_ranks(self, delta, layer, is_whole=is_whole)
        if block.experts is not None:
            self._experts(layer, block.experts, x)

    def _dense(
        self, layer: int, dense: Dense, x: Value, *, reader_adds: bool
    ) -> tuple[Value, bool]:
        """Returns the half's output, and whether it is whole, and not one rank's term."""
        if dense.is_gated:
            both = self.value("gate_up", dense.gate_up.out_features)
            list_product(self, x, both, layer, dense.gate_up, reader_adds=True)
            gated = self.value("gated", dense.size)
            self.ops.append(Gate((both,), gated, layer, dense.activation))
        else:
            gated = list_activation(self, layer, dense, x)
        delta = self.value("delta", dense.down.out_features)
        is_whole = dense.down.in_cut is None
        adds = reader_adds and is_whole
        list_product(self, gated, delta, layer, dense.down, reader_adds=adds)
        return delta, is_whole

    def _experts(self, layer: int, experts: Experts, x: Value) -> None:
        delta = self.value("delta", self._decoder.hidden_size)
        shared = delta if experts.shared is not None else None
        if experts.shared_post_norm is not None:
            self._norm_of(delta, experts.shared_post_norm, layer)
        gate = None
        if experts.shared_gate is not None:
            gate = self.value("shared_logits", 1, is_wide=True)
            self.ops.append(Project((x,), gate, layer, experts.shared_gate))
        routing = self._route(layer, experts, x)
        if experts.norm is not None:
            x = self._norm_of(self._hidden, experts.norm, layer, "experts_input")
        made = self._of_pairs(layer, experts, x, routing)
        is_whole = experts.down.in_cut is None and experts.cut is None
        if experts.post_norm is None:
            inputs = (each for each in (made, routing, shared, gate) if each is not None)
            self.ops.append(Combine(tuple(inputs), delta, layer, shared, gate))
            _sum_ranks(self, delta, layer, is_whole=is_whole)
            return
        assert shared is not None
        assert gate is None
        routed = self.value("routed", self._decoder.hidden_size)
        self.ops.append(Combine((made, routing), routed, layer))
        _sum_ranks(self, routed, layer, is_whole=is_whole)
        self._norm_of(routed, experts.post_norm, layer)
        self.ops.append(AddNorm((delta, routed), delta, layer, None))

    def _route(self, layer: int, experts: Experts, x: Value) -> Value:
        """Returns the routing."""
        router = experts.router
        if router.norm is not None:
            x = self._norm_of(self._hidden, router.norm, layer, "router_input")
        logits = self.value("router_logits", experts.num_experts, is_wide=True)
        self.ops.append(Project((x,), logits, layer, router.projection))
        routing = self.value("routing", 0)
        self.ops.append(Route((logits,), routing, layer, experts))
        return routing

    def _of_pairs(self, layer: int, experts: Experts, x: Value, routing: Value) -> Value:
        """Returns the experts' output of each pair."""
        rows = self.value("pairs", x.width, Rows.PAIRS)
        self.ops.append(Spread((x, routing), rows, layer))

        def project(of: Value, projection: ExpertsProjection, name: str) -> Value:
            out = self.value(name, projection.out_features, Rows.PAIRS)
            self.ops.append(ProjectExperts((of, routing), out, layer, projection))
            return out

        both = project(rows, experts.gate_up, "pairs_gate_up")
        gated = self.value("pairs_gated", experts.size, Rows.PAIRS)
        self.ops.append(Gate((both,), gated, layer, experts.activation))
        return project(gated, experts.down, "pairs_out")

    def _layer_input(self, layer: int, layer_input: LayerInput) -> None:
        """Writes the output for the layer's own input to the delta."""
        assert self._layer_inputs is not None
        size, own = layer_input.out.in_features, self._layer_inputs
        part: int | None = layer
        if self._rows is not own.rows:
            chosen = self.value("layer_input", size)
            self.ops.append(Gather((own,), chosen, None, part))
            own, part = chosen, None
        gate, gated = self.value("layer_gate", size), self.value("layer_gated", size)
        self.ops.append(Project((self._hidden,), gate, layer, layer_input.gate))
        self.ops.append(Gate((gate, own), gated, layer, layer_input.activation, part))
        delta = self.value("delta", self._decoder.hidden_size)
        self.ops.append(Project((gated,), delta, layer, layer_input.out))

    def _leave(
        self,
        delta: Value,
        norm: Norm | None,
        scale: float,
        layer: int,
        sum_norm: Norm | None = None,
    ) -> None:
        """Leaves a delta, normed or not, to be added by the next norm of the stream; or, with a
        norm of the sum, adds it, and goes on with that norm."""
        if norm is not None:
            self._norm_of(delta, norm, layer)
        assert self._delta is None
        self._delta, self._delta_scale, self._sum_scale = delta, scale, 1.0
        if sum_norm is not None:
            self._add_norm(sum_norm, self._hidden, layer)

    def _normed(self, norm: Norm | None, layer: int) -> Value:
        """Returns the norm of the stream, or the stream itself, when the delta is added."""
        if norm is None:
            self._add()
            return self._hidden
        out = self.value("normed", self._hidden.width)
        self._add_norm(norm, out, layer)
        return out

    def _add(self) -> None:
        """Adds the delta to the stream, if there is one."""
        if self._delta is not None:
            self._add_norm(None, self._hidden, None)

    def _add_norm(self, norm: Norm | None, out: Value, layer: int | None) -> None:
        inputs: tuple[Value, ...] = (self._hidden,)
        if self._delta is not None:
            inputs = self._hidden, self._delta
        self.ops.append(AddNorm(inputs, out, layer, norm, self._delta_scale, self._sum_scale))
        self._delta, self._delta_scale, self._sum_scale = None, 1.0, 1.0

    def _norm_of(self, x: Value, norm: Norm, layer: int | None, name: str | None = None) -> Value:
        """Norms a value in place, or to a value of this name."""
        out = x if name is None else self.value(name, x.width)
        self.ops.append(NormOf((x,), out, layer, norm))
        return out


def _scale(walk: Walk, x: Value, scale: float, *, is_rounded: bool) -> None:
    walk.ops.append(Scale((x,), x, None, scale, is_rounded))


def _next_is_normed(decoder: Decoder, layer: int, block: Block) -> bool:
    """Returns whether a norm reads the feed-forward half's delta, or its sum with the stream."""
    if block.feed_forward_post_norm is not None:
        return True
    if has_taps(decoder, layer):
        return False
    blocks, stage = decoder.blocks, decoder.stage
    if stage is not None and layer == stage.layers[-1] and not stage.is_last:
        return False
    has_next = layer + 1 == len(blocks) or blocks[layer + 1].attention_norm is not None
    return block.layer_input is None and has_next


def _table(decoder: Decoder) -> Table:
    """Returns the embedding."""
    cut = _vocab_cut(decoder)
    num_rows = decoder.vocab_size if cut is None else cut.size
    return Table(EMBEDDING_KEY, EMBED_TOKENS, num_rows, decoder.hidden_size, cut)


def _vocab_cut(decoder: Decoder) -> Cut | None:
    """Returns the tokens whose rows of the embedding and the head are here; None: all."""
    return None if decoder.rank is None else decoder.rank.part(decoder.vocab_size)


def _sum_ranks(walk: Walk, value: Value, layer: int, *, is_whole: bool) -> None:
    """Sums the terms of ranks, unless each has the whole."""
    if not is_whole:
        walk.ops.append(SumRanks((value,), value, layer))


MIXERS: dict[type, Callable[[Walk, int, Any, Value], Value]] = {
    Attention: Walk.attend,
    BothWays: list_attention,
    gated_delta.GatedDelta: gated_delta.list_operations,
    short_conv.ShortConv: short_conv.list_operations,
}
"""The function that lists the operations of each kind of mixer, up to its last projection: it adds
them to the walk, of a layer with this mixer and this input, and returns their output."""
