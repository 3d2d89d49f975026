"""Cuts a decoder's description into the parts of ranks (tensor parallelism).

Projections that read the residual stream are cut by outputs: queries, keys and values by heads, and
feed-forward halves and experts by their intermediate size. The projections behind them are cut by
inputs: each rank's outputs are one term of a sum, and the first rank's has the bias. Embedding and
head are cut by tokens. Everything else is whole on every rank, which computes it alike: norms,
routers, shared gates, and per-layer inputs. Where ranks are more than heads of keys and values,
several ranks have the same head.

Source: Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import (
    Attention,
    Block,
    Cut,
    Decoder,
    Dense,
    Experts,
    ExpertsProjection,
    Member,
    Projection,
    Rank,
)
from inference_svc.model.features import kind_of
from kernels.quantised import Activations, WeightFormat

AnyProjection = TypeVar("AnyProjection", bound=Projection | ExpertsProjection)


def of_rank(decoder: Decoder, rank: Rank) -> Decoder:
    """Returns the part of a decoder that a rank has.

    Args:
        decoder: A whole decoder.
        rank: The rank. The one of one has the whole.

    Raises:
        UnsupportedModel: A size does not divide, or a part cannot be cut; it names the field, its
            value, and the numbers of ranks that fit.
    """
    assert decoder.rank is None, "it is a rank's part already"
    if rank.count == 1:
        return decoder
    cutter = _Cutter(rank, has_stored_scales=decoder.quantisation is not None)
    if rank.part_size(decoder.vocab_size) * (rank.count - 1) >= decoder.vocab_size:
        reason = "leaves a rank without a token; use fewer"
        raise cutter.refused("decoder.vocab_size", decoder.vocab_size, reason)
    blocks = tuple(cutter.block(block, layer) for layer, block in enumerate(decoder.blocks))
    return replace(decoder, blocks=blocks, rank=rank)


class _Cutter:
    """Cuts the parts of layers. `layer` is the one that messages name. Scales of weights in few
    bits are stored, or computed while plain weights are read."""

    def __init__(self, rank: Rank, *, has_stored_scales: bool) -> None:
        self._rank = rank
        self._has_stored_scales = has_stored_scales
        self._layer = 0

    def refused(self, field: str, value: object, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"--tensor-parallel {self._rank.count}: {field} = {value} {reason}")

    def block(self, block: Block, layer: int) -> Block:
        self._layer = layer
        mixer, half = block.mixer, block.feed_forward
        if not isinstance(mixer, Attention):
            reason = "keeps a recurrent state, which cannot be cut yet; use one rank"
            raise self.refused(f"layers[{layer}].mixer", kind_of(type(mixer)), reason)
        return replace(
            block,
            mixer=self._attention(mixer),
            feed_forward=self._dense(half) if isinstance(half, Dense) else self._experts(half),
        )

    def _attention(self, attention: Attention) -> Attention:
        if attention.norms_all_heads:
            reason = "is over all heads at once, which cannot be cut yet; use one rank"
            sizes = (each.size for each in (attention.q_norm, attention.k_norm) if each is not None)
            raise self.refused(self._path("q_norm.size"), max(sizes), reason)
        heads = self._even(attention.num_heads, "num_heads")
        kv_heads = self._kv_heads(attention.num_kv_heads)
        members = list(attention.qkv.members)
        queries, *others = members
        members = [_member(queries, heads)]
        members += [_member(each, kv_heads) for each in others]
        size = attention.head_dim
        inputs = Cut(heads.start * size, heads.end * size, heads.whole * size)
        return replace(
            attention,
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            qkv=replace(attention.qkv, members=tuple(members)),
            out=self._by_inputs(attention.out, inputs),
        )

    def _kv_heads(self, num_kv_heads: int) -> Cut:
        """Returns the heads of keys and values that this rank's queries read."""
        index, count = self._rank.index, self._rank.count
        if num_kv_heads % count == 0:
            return self._even(num_kv_heads, "num_kv_heads")
        if count % num_kv_heads:
            reason = "neither divides into ranks, nor ranks into it; use a number that does"
            raise self.refused(self._path("num_kv_heads"), num_kv_heads, reason)
        head = index * num_kv_heads // count
        return Cut(head, head + 1, num_kv_heads)

    def _dense(self, dense: Dense) -> Dense:
        cut = self._even(dense.size, "dense.size")
        members = tuple(_member(each, cut) for each in dense.gate_up.members)
        return replace(
            dense,
            gate_up=replace(dense.gate_up, members=members),
            down=self._by_inputs(dense.down, cut),
        )

    def _experts(self, experts: Experts) -> Experts:
        """Cuts each expert as a dense half: ranks have a part of all of them."""
        cut = self._even(experts.size, "experts.size")
        members = tuple(_member(each, cut) for each in experts.gate_up.members)
        return replace(
            experts,
            gate_up=replace(experts.gate_up, members=members),
            down=self._by_inputs(experts.down, cut),
            shared=None if experts.shared is None else self._dense(experts.shared),
        )

    def _by_inputs(self, projection: AnyProjection, cut: Cut) -> AnyProjection:
        for form in (part.format for part in projection.parts):
            if form is not None:
                self._check_format(projection.name, form, cut)
        return replace(projection, in_features=cut.size, in_cut=cut)

    def _check_format(self, name: str, form: WeightFormat, cut: Cut) -> None:
        """Raises UnsupportedModel where ranks would compute something else than one does."""
        size, field = form.group_size, self._path(f"{name}.format")
        if form.activations is Activations.INT8:
            reason = "rounds a token's inputs by all of them, and a rank has some; use one rank"
            raise self.refused(field, form, reason)
        if size and (cut.start % size or (cut.end % size and cut.end != cut.whole)):
            reason = f"has groups of {size} inputs, which {cut.size} inputs of a rank would cut"
            raise self.refused(field, form, reason)
        if not size and not self._has_stored_scales:
            reason = "has a scale for all inputs, of which a rank has some; use --quantize int4"
            raise self.refused(field, form, reason)

    def _even(self, whole: int, field: str) -> Cut:
        index, count = self._rank.index, self._rank.count
        if whole % count:
            fits = ", ".join(str(n) for n in range(1, count + 1) if whole % n == 0)
            reason = f"does not divide by {count}; numbers up to it that do: {fits}"
            raise self.refused(self._path(field), whole, reason)
        size = whole // count
        return Cut(index * size, (index + 1) * size, whole)

    def _path(self, field: str) -> str:
        return f"layers[{self._layer}].{field}"


def _member(member: Member, cut: Cut) -> Member:
    """Returns the part of a linear layer whose outputs are the whole's in as many equal runs as the
    cut has features, such as heads."""
    width = member.out_features // cut.whole
    outputs = Cut(*(width * each for each in cut))
    return member._replace(out_features=outputs.size, cut=outputs)
