"""Cuts a decoder's description into the parts of ranks (tensor parallelism).

Projections that read the residual stream are cut by outputs: queries, keys and values by heads,
recurrent mixers by heads or channels, with their convolutions and states, and feed-forward halves
and experts by their intermediate size; or each rank has some of the experts, whole (expert
parallelism). The projections behind them are cut by inputs: each rank's
outputs are one term of a sum, and the first rank's has the bias. Embedding and head are cut by
tokens. Norms over all heads are cut by heads, and ranks exchange sums of squares. Everything else
is whole on every rank, which computes it alike: other norms, routers, shared gates, and per-layer
inputs. Where ranks are more than heads of keys and values, several ranks have the same head.

Source: Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

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
    Norm,
    NormKind,
    Projection,
    Rank,
)
from inference_svc.model.features import kind_of
from inference_svc.model.mixers.gated_delta import GatedDelta
from inference_svc.model.mixers.short_conv import ShortConv
from kernels.quantised import Activations, WeightFormat

SETTING = "--tensor-parallel"
AnyProjection = TypeVar("AnyProjection", bound=Projection | ExpertsProjection)


def of_rank(decoder: Decoder, rank: Rank, expert_parallel: int = 1) -> Decoder:
    """Returns the part of a decoder that a rank has.

    Args:
        decoder: A whole decoder.
        rank: The rank. The one of one has the whole.
        expert_parallel: Into how many parts the experts of mixtures are divided, which divides the
            number of ranks: experts of a part are cut over as many ranks as have it.

    Raises:
        UnsupportedModel: A size does not divide, or a part cannot be cut; it names the field, its
            value, and the numbers of ranks that fit.
    """
    assert decoder.rank is None, "it is a rank's part already"
    if rank.count == 1:
        return decoder
    if decoder.encoder is not None:
        reason = f"{decoder.architecture} is an encoder, which one process computes"
        raise UnsupportedModel(f"{SETTING} {rank.count}: {reason}")
    cutter = _Cutter(rank, expert_parallel, is_stored=decoder.quantisation is not None)
    if expert_parallel > 1 and not decoder.mixtures:
        raise UnsupportedModel(
            f"--expert-parallel {expert_parallel}: the model has no experts; leave it out"
        )
    if rank.part_size(decoder.vocab_size) * (rank.count - 1) >= decoder.vocab_size:
        reason = "leaves a rank without a token; use fewer"
        raise cutter.refused("decoder.vocab_size", decoder.vocab_size, reason)
    blocks = tuple(cutter.block(block, layer) for layer, block in enumerate(decoder.blocks))
    return replace(decoder, blocks=blocks, rank=rank)


class _Cutter:
    """Cuts the parts of layers. `layer` is the one that messages name. Weights in few bits
    are stored so, or made while plain weights are read."""

    def __init__(self, rank: Rank, expert_parallel: int, *, is_stored: bool) -> None:
        assert rank.count % expert_parallel == 0, "checked settings"
        self._rank, self._expert_parallel = rank, expert_parallel
        self._is_stored = is_stored
        self._layer = 0

    def refused(
        self, field: str, value: object, reason: str, setting: str = SETTING
    ) -> UnsupportedModel:
        count = self._rank.count if setting == SETTING else self._expert_parallel
        return UnsupportedModel(f"{setting} {count}: {field} = {value} {reason}")

    def block(self, block: Block, layer: int) -> Block:
        self._layer = layer
        mixer, half = block.mixer, block.feed_forward
        cut_mixer = MIXERS.get(type(mixer))
        if cut_mixer is None:
            reason = "cannot be cut; use one rank"
            raise self.refused(f"layers[{layer}].mixer", kind_of(type(mixer)), reason)
        return replace(
            block,
            mixer=cut_mixer(self, mixer),
            feed_forward=self._dense(half) if isinstance(half, Dense) else self._experts(half),
        )

    def attention(self, attention: Attention) -> Attention:
        if attention.norms_all_heads and attention.norms_rotated:
            reason = "norms all heads at once, behind the rotation; use one rank"
            raise self.refused(self._path("norms_rotated"), "true", reason)
        size, heads = attention.head_dim, self._even(attention.num_heads, "num_heads")
        kv_heads = self._kv_heads(attention.num_kv_heads)
        members = list(attention.qkv.members)
        queries, *others = members
        members = [_member(queries, heads)]
        members += [_member(each, kv_heads) for each in others]

        def cut_norm(norm: Norm | None, cut: Cut) -> Norm | None:
            if norm is None or norm.size == size:
                return norm
            if norm.kind is not NormKind.RMS:
                reason = "centres all heads at once, which cannot be cut; use one rank"
                raise self.refused(self._path("norm.kind"), norm.kind.value, reason)
            return replace(norm, size=cut.size * size, cut=cut.times(size))

        return replace(
            attention,
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            qkv=replace(attention.qkv, members=tuple(members)),
            out=self._by_inputs(attention.out, heads.times(size)),
            q_norm=cut_norm(attention.q_norm, heads),
            k_norm=cut_norm(attention.k_norm, kv_heads),
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

    def gated_delta(self, mixer: GatedDelta) -> GatedDelta:
        """Cuts key heads, and with each the value heads that read it."""
        key_heads = self._even(mixer.num_key_heads, "gated_delta.num_key_heads")
        per_head = mixer.num_value_heads // mixer.num_key_heads
        first, *others = mixer.into.members
        members = [_member(each, key_heads) for each in others]
        keys, values = (
            key_heads.times(size) for size in (mixer.key_head_dim, per_head * mixer.value_head_dim)
        )
        if mixer.is_by_key_head:
            members.insert(0, _member(first, key_heads))
        else:
            members.insert(0, _member_of_kinds(first, keys, keys, values))
        return replace(
            mixer,
            num_key_heads=key_heads.size,
            num_value_heads=key_heads.size * per_head,
            into=replace(mixer.into, members=tuple(members)),
            out=self._by_inputs(mixer.out, values),
        )

    def short_conv(self, mixer: ShortConv) -> ShortConv:
        """Cuts channels, each with its two gates."""
        channels = self._even(mixer.num_channels, "short_conv.num_channels")
        [member] = mixer.into.members
        member = _member_of_kinds(member, channels, channels, channels)
        return replace(
            mixer,
            into=replace(mixer.into, members=(member,)),
            out=self._by_inputs(mixer.out, channels),
        )

    def _dense(self, dense: Dense) -> Dense:
        cut = self._even(dense.size, "dense.size")
        members = tuple(_member(each, cut) for each in dense.gate_up.members)
        return replace(
            dense,
            gate_up=replace(dense.gate_up, members=members),
            down=self._by_inputs(dense.down, cut),
        )

    def _experts(self, experts: Experts) -> Experts:
        """Gives each rank some of the experts, or all, and cuts these as a dense half over the
        ranks that have the same."""
        gate_up, down = experts.gate_up, experts.down
        part, place = divmod(self._rank.index, self._rank.count // self._expert_parallel)
        held = Rank(part, self._expert_parallel)
        if held.count > 1:
            own = self._even(experts.num_experts, "experts.num_experts", held, "--expert-parallel")
            gate_up = replace(gate_up, num_experts=own.size, cut=own)
            down = replace(down, num_experts=own.size, cut=own)
        if held.count < self._rank.count:
            of_part = Rank(place, self._rank.count // held.count)
            cut = self._even(experts.size, "experts.size", of_part)
            members = tuple(_member(each, cut) for each in gate_up.members)
            gate_up = replace(gate_up, members=members)
            down = self._by_inputs(down, cut)
        shared = None if experts.shared is None else self._dense(experts.shared)
        return replace(experts, gate_up=gate_up, down=down, shared=shared)

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
            remedy = "use fewer ranks" if self._is_stored else "use --quantize int8, or fewer ranks"
            raise self.refused(field, form, f"{reason}; {remedy}")

    def _even(
        self, whole: int, field: str, part: Rank | None = None, setting: str = SETTING
    ) -> Cut:
        """Returns this rank's part, of as many equal ones as ranks; or that of another count."""
        index, count = (part or self._rank).index, (part or self._rank).count
        if whole % count:
            fits = ", ".join(str(n) for n in range(1, count + 1) if whole % n == 0)
            reason = f"does not divide by {count}; numbers up to it that do: {fits}"
            raise self.refused(self._path(field), whole, reason, setting)
        size = whole // count
        return Cut(index * size, (index + 1) * size, whole)

    def _path(self, field: str) -> str:
        return f"layers[{self._layer}].{field}"


def _member(member: Member, cut: Cut) -> Member:
    """Returns the part of a linear layer whose outputs are the whole's in as many equal runs as the
    cut has features, such as heads."""
    return _member_of_kinds(member, cut.times(member.out_features // cut.whole))


def _member_of_kinds(member: Member, *cuts: Cut) -> Member:
    """Returns the part of a linear layer whose outputs are of several kinds, one behind the other,
    each with its cut."""
    assert sum(cut.whole for cut in cuts) == member.out_features
    return member._replace(out_features=sum(cut.size for cut in cuts), cuts=cuts)


MIXERS: Mapping[type, Callable[[_Cutter, Any], Any]] = {
    Attention: _Cutter.attention,
    GatedDelta: _Cutter.gated_delta,
    ShortConv: _Cutter.short_conv,
}
"""The method that cuts each kind of mixer."""
