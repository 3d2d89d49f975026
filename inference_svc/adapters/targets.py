"""Which weights of a decoder adapters may change, and which of them are computed together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch

from contract.images.dtypes import FLOAT8
from contract.images.targets import SAMPLED, TEXT, Held, OtherName, Target, TargetKind
from inference_svc.adapters.layout import (
    EMBEDDING,
    FLOAT8_FORMATS,
    HEAD,
    IMAGE_FORMATS,
    ModelLayout,
)
from inference_svc.adapters.picture_targets import PREFIX, linear_targets, vector_targets
from inference_svc.adapters.projections import experts_targets_of, slice_of, targets_of
from inference_svc.core import EngineConfig
from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.parameters import vectors
from inference_svc.model.checkpoint.wrapper import BARE, HEADED, Wrapper
from inference_svc.model.description import (
    EMBED_TOKENS,
    LM_HEAD,
    SCORE,
    Decoder,
    ExpertsProjection,
    Projection,
    Rank,
)
from inference_svc.model.walk import weights_of
from kernels.lora import LoraGroup


def layout_of(config: EngineConfig, decoder: Decoder) -> ModelLayout:
    """Returns the layout that an engine with this config announces."""
    dtype = getattr(torch, config.dtype)
    return build_layout(
        decoder,
        config.base_model,
        dtype,
        config.adapter_dtype,
        is_fully_sharded=config.fully_sharded_loras,
        has_classifiers=config.classifiers,
    )


@lru_cache(maxsize=4)
def build_layout(
    decoder: Decoder,
    base_model: str,
    dtype: torch.dtype,
    adapter_dtype: str = "auto",
    *,
    is_fully_sharded: bool = False,
    has_classifiers: bool = False,
) -> ModelLayout:
    """Returns the targets of a decoder, by the names of Hugging Face's modules. `adapter_dtype` is
    the type of A and B, "fp8"; "auto": `dtype`. If it `is_fully_sharded`, a rank's part of a
    projection has a part of A's inputs and of B's outputs. Adapters may have a classifier's head of
    their own if it `has_classifiers`, or the model is one. A stage's layout has the targets of all
    stages, and says of the others' that they are elsewhere. Towers' ones come last: all ranks of
    the first stage have them whole, because their images lie alike, and only the first one computes
    them. Raises UnsupportedModel for inputs or outputs that ranks cannot share."""
    stage, decoder = decoder, decoder.of_all_stages
    hidden, vocab = decoder.hidden_size, decoder.vocab_size
    tied_to = EMBED_TOKENS if decoder.head.is_tied else ""
    targets = [
        Target(EMBED_TOKENS, None, EMBEDDING, TargetKind.EMBEDDING, vocab, hidden, space=TEXT)
    ]
    for spec, layer in weights_of(decoder):
        if isinstance(spec, ExpertsProjection):
            targets += experts_targets_of(spec, layer)
        elif isinstance(spec, Projection) and spec.name != HEAD:
            targets += targets_of(spec, layer)
    linear = TargetKind.LINEAR
    if decoder.encoder is None:
        targets.append(
            Target(LM_HEAD, None, HEAD, linear, hidden, vocab, space=SAMPLED, tied_to=tied_to)
        )
    more = tuple(_vector_targets(decoder))
    if has_classifiers or decoder.labels:
        targets += _head_targets(decoder)
        more += _head_vectors(decoder)
    rename = _renaming(decoder)
    targets, more = list(map(rename, targets)), tuple(map(rename, more))
    for tower in decoder.towers:
        targets, more = [*targets, *linear_targets(tower)], (*more, *vector_targets(tower))
    summed = frozenset(target.group for target in targets if target.in_slice is not None)
    if is_fully_sharded and decoder.rank is not None:
        targets = [_shared(target, decoder.rank) for target in targets]
    if stage is not decoder:
        targets = [_placed(target, stage) for target in targets]
        more = tuple(_placed(target, stage) for target in more)
    is_float8 = adapter_dtype == "fp8"
    return ModelLayout(
        base_model,
        decoder.config_sha256,
        dtype,
        FLOAT8_FORMATS if is_float8 else IMAGE_FORMATS,
        tuple(targets),
        more,
        adapter_dtype=FLOAT8 if is_float8 else None,
        summed_groups=summed,
    )


def _head_targets(decoder: Decoder) -> Iterator[Target]:
    """Yields the matrices of a classifier's head of the adapter's own, of any number of labels."""
    hidden, linear = decoder.hidden_size, TargetKind.LINEAR
    head = None if decoder.encoder is None else decoder.encoder.head
    if head is None:
        yield Target(SCORE, None, SCORE, linear, hidden, 0, space=SAMPLED)
        return
    modules = {SCORE: head.out} | ({f"{SCORE}_dense": head.dense} if head.is_adapters else {})
    for name, module in modules.items():
        others = (OtherName(module),)
        yield Target(name, None, SCORE, linear, hidden, 0, other_names=others, space=SAMPLED)


def _head_vectors(decoder: Decoder) -> tuple[Target, ...]:
    """Returns the biases of the head's matrices; of a decoder only heads of tokens have one."""
    return tuple(
        replace(
            each,
            name=f"{each.name}.bias",
            group=f"{each.name}.bias",
            kind=TargetKind.VECTOR,
            in_features=0,
            other_names=tuple(OtherName(f"{other.name}.bias") for other in each.other_names),
        )
        for each in _head_targets(decoder)
    )


def _vector_targets(decoder: Decoder) -> Iterator[Target]:
    """Yields the norms and biases of the base."""
    last = None if decoder.final_norm is None else decoder.final_norm.module
    for vector in vectors(decoder):
        yield Target(
            name=vector.name,
            layer=vector.layer,
            group=vector.name,
            kind=TargetKind.VECTOR,
            in_features=0,
            out_features=vector.outputs.whole,
            out_slice=slice_of(vector.outputs),
            space=SAMPLED if vector.name == last else TEXT,
        )


def _also_bare(target: Target) -> Target:
    """Returns a target that adapters may also call as the class without a head does, which they
    were trained on."""
    names = (OtherName(target.name), *target.other_names)
    bare = tuple(
        replace(each, name=each.name.removeprefix(HEADED))
        for each in names
        if each.name.startswith(HEADED)
    )
    return replace(target, other_names=(*target.other_names, *bare))


def _renaming(decoder: Decoder) -> Callable[[Target], Target]:
    """Returns the function that gives targets the further names which adapters may have."""
    if decoder.wrapper == BARE:
        return _also_bare
    if decoder.encoder is not None or decoder.wrapper.has_own_names:
        return partial(_also_stored, wrapper=decoder.wrapper)
    return lambda target: target


def _also_stored(target: Target, wrapper: Wrapper) -> Target:
    """Returns a target that adapters may also call as checkpoints do."""
    names = (OtherName(target.name), *target.other_names)
    stored = tuple(
        replace(each, name=name) for each in names for name in wrapper.stored_names(each.name)
    )
    return replace(target, other_names=(*target.other_names, *stored))


def _placed(target: Target, stage: Decoder) -> Target:
    """Returns a target as a stage has it, here or elsewhere."""
    if target.is_of_pictures:
        is_here = stage.has_embedding
    elif target.layer is not None:
        is_here = target.layer in stage.layers
    else:
        is_first = target.name == EMBED_TOKENS
        is_here = stage.has_embedding if is_first else stage.has_head
    return target if is_here else replace(target, held=Held.ELSEWHERE)


def _shared(target: Target, rank: Rank) -> Target:
    """Returns a target that is cut by inputs or by outputs, cut by both."""
    if target.in_slice is None and target.out_slice is None:
        return target
    inputs = target.in_slice or _even_part(target.in_features, rank, f"{target.name}'s inputs")
    outputs = target.out_slice or _even_part(target.out_features, rank, f"{target.name}'s outputs")
    return replace(target, in_slice=inputs, out_slice=outputs)


def _even_part(whole: int, rank: Rank, what: str) -> tuple[int, int]:
    if whole % rank.count:
        reason = f"{what}, {whole}, do not divide by --tensor-parallel {rank.count}"
        raise UnsupportedModel(f"--fully-sharded-loras: {reason}")
    return rank.part(whole).range


def cut_as(layout: ModelLayout, other: ModelLayout) -> ModelLayout:
    """Returns a layout with the slices, and the places, of another rank's, which has the same
    targets."""

    def cut(own: Iterable[Target], others: Iterable[Target]) -> tuple[Target, ...]:
        pairs = zip(own, others, strict=True)
        return tuple(
            replace(
                one,
                in_slice=two.in_slice,
                out_slice=two.out_slice,
                expert_slice=two.expert_slice,
                held=two.held,
            )
            for one, two in pairs
        )

    return replace(
        layout,
        targets=cut(layout.targets, other.targets),
        vectors=cut(layout.vectors, other.vectors),
    )


@dataclass(frozen=True, slots=True)
class AppliedTargets:
    """The targets that adapters of a server change: `groups` by name, `of_experts` the ones among
    these that are of experts, and the places in the table of `weights` that they replace, by the
    names of these. Adapters may have `max_added_tokens` behind the `vocab_size` of the base.
    `shared` are `ModelLayout.shared_groups`."""

    groups: Mapping[str, LoraGroup]
    weights: Mapping[str, int]
    vocab_size: int
    max_added_tokens: int
    of_experts: frozenset[int] = frozenset()
    shared: Mapping[str, int] = field(default_factory=dict)

    def names_of(self, places: Collection[int]) -> list[str]:
        """Returns the names of weights at these places, in the order of the layout."""
        return [name for name, place in self.weights.items() if place in places]


def applied_targets(
    layout: ModelLayout, lora_targets: Collection[str] = (), max_added_tokens: int = 0
) -> AppliedTargets:
    """Returns the targets that adapters of a server with this layout change."""
    vocab_size = next((t.in_features for t in layout.targets if t.name == EMBED_TOKENS), 0)
    groups = lora_groups(layout, lora_targets)
    weights = {
        target.name: place
        for place, target in _replaced_weights(layout, lora_targets)
        if not target.is_of_pictures
    }
    of_experts = frozenset(
        target
        for group in groups.values()
        for target in group.targets
        if layout.targets[target].kind is TargetKind.EXPERTS
    )
    return AppliedTargets(
        groups, weights, vocab_size, max_added_tokens, of_experts, layout.shared_groups
    )


def applied_to_pictures(layout: ModelLayout, lora_targets: Collection[str] = ()) -> AppliedTargets:
    """Returns the targets of its tower and connector that adapters of a server with this layout
    change. Groups, and norms, have the names that the tower has for them; linear layers whose
    weights are replaced have the whole model's."""
    weights: dict[str, int] = {}
    for place, target in _replaced_weights(layout, lora_targets):
        if target.is_of_pictures:
            is_vector = target.kind is TargetKind.VECTOR
            weights[target.group.removeprefix(PREFIX) if is_vector else target.name] = place
    groups = _groups(layout, lora_targets, of_pictures=True)
    own = {name.removeprefix(PREFIX): group for name, group in groups.items()}
    return AppliedTargets(own, weights, 0, 0)


def _replaced_weights(
    layout: ModelLayout, lora_targets: Collection[str]
) -> Iterator[tuple[int, Target]]:
    """Yields the weights of the base here that adapters of a server may replace, by their places in
    the table."""
    for place, index in enumerate(layout.weights):
        target = layout.all_targets[index]
        if target.held is Held.HERE and (not lora_targets or target.module in lora_targets):
            yield place, target


def computed_groups(config: EngineConfig, decoder: Decoder) -> dict[str, LoraGroup]:
    """Returns the groups that an engine with this config computes."""
    return lora_groups(layout_of(config, decoder), config.lora_targets)


def lora_groups(layout: ModelLayout, lora_targets: Collection[str] = ()) -> dict[str, LoraGroup]:
    """Returns by group name the columns computed together here, and their places in the fused
    output, but for pictures' ones, which `applied_to_pictures` has.

    Of a server that is restricted to some targets, the groups that have any of these: nothing is
    launched for others. Such a group is whole, as kernels pass over targets that no adapter
    changes.
    """
    return _groups(layout, lora_targets, of_pictures=False)


def _groups(
    layout: ModelLayout, lora_targets: Collection[str], *, of_pictures: bool
) -> dict[str, LoraGroup]:
    columns: dict[str, list[int]] = {}
    for column, target in enumerate(layout.targets):
        is_here = target.held is Held.HERE and target.is_of_pictures is of_pictures
        if is_here and target.out_features:
            columns.setdefault(target.group, []).append(column)
    groups = {}
    for name, members in columns.items():
        modules = {layout.targets[column].module for column in members}
        if lora_targets and modules.isdisjoint(lora_targets):
            continue
        sizes = [layout.targets[column].num_out for column in members]
        first = layout.targets[members[0]].outputs[0] if name in layout.summed_groups else 0
        offsets = [first + sum(sizes[:index]) for index in range(len(sizes))]
        groups[name] = LoraGroup(
            targets=tuple(members),
            in_features=layout.targets[members[0]].num_in,
            out_offsets=tuple(offsets),
            out_features=tuple(sizes),
        )
    return groups
