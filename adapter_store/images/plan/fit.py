"""Which targets of a layout an adapter changes, and whether all of it has a place there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.peft.experts import ExpertModule, expert_module, other_name
from adapter_store.checkpoint.peft.module_patterns import OUTPUT_LAYER, path_tails
from adapter_store.checkpoint.peft.towers import describe_unknown
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.checkpoint.weights import (
    Changes,
    ExpertWeights,
    Matrix,
    ParameterOrder,
    Replacement,
)
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.plan.ties import with_ties
from adapter_store.images.plan.uses import Use, incompatible, key_of
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Held, OtherName, Target, TargetKind

ADDED_TOKENS = (
    ": tokens were added to the vocabulary of the base model; an adapter has rows of its own for "
    "them (trainable_token_indices, modules_to_save), not A and B"
)
SAVED_ALONG = (
    "a base weight, which PEFT saves with an adapted embedding or head, or where tokens were "
    "added to the vocabulary, and the server has not announced the base's own values: where they "
    "are equal, `loadout strip IN OUT --model DIR` makes a copy without it; or save with "
    "save_embedding_layers=False"
)
_MATRICES = (TargetKind.LINEAR, TargetKind.EMBEDDING)
_PLAIN_KINDS = frozenset({SegmentKind.A, SegmentKind.B})

_Named: TypeAlias = tuple[int, OtherName | None]


def fit(checkpoint: Checkpoint, layout: Layout) -> list[Use]:
    """Returns the adapter's changes of the layout, in the layout's order; for one target LoRA
    before its replacement.

    Raises IncompatibleAdapter, with the tensor or target as subject: FORMAT_TOO_OLD,
    TARGET_UNKNOWN, TARGET_TWICE, KIND_MISMATCH, SHAPE_MISMATCH, BASE_UNKNOWN or TARGET_MISSING.
    """
    if layout.image_format == 1 and checkpoint.invocation_tokens:
        raise IncompatibleAdapter(
            "it has invocation tokens (aLoRA), which need image format 2, and the server reads "
            "only format 1: upgrade the server",
            subject="alora_invocation_tokens",
            reason="FORMAT_TOO_OLD",
        )
    names = _Names(layout)
    uses: list[Use] = []
    unknown: list[Changes] = []
    for changes in _gathered(checkpoint.changes, names):
        is_copy = isinstance(changes, Replacement) and changes.is_copy
        if layout.image_format == 1 and not is_copy:
            _check_format_1(changes)
        found = names.find(changes.name)
        if not found:
            unknown.append(changes)
        outputs = _module_outputs(layout, found)
        for index, other in found:
            target = layout.targets[index]
            name = other.name if other is not None else target.name
            is_transposed = isinstance(changes, ExpertWeights) and names.is_transposed(name)
            uses.append(Use(index, target, changes, other, outputs, is_transposed))
    if unknown:
        raise _unknown(unknown, uses, layout)
    uses = with_ties(uses, layout, checkpoint.config)
    for use in uses:
        _check_use(use)
    uses.sort(key=lambda use: (use.column, isinstance(use.changes, Replacement)))
    _check_once(uses)
    _check_added_tokens(uses)
    _check_invocation(checkpoint, uses)
    _check_complete(checkpoint, layout, uses)
    return uses


def _unknown(
    unknown: Sequence[Changes], uses: Iterable[Use], layout: Layout
) -> IncompatibleAdapter:
    """Returns the error for modules that are no target, besides the used ones."""
    names = [changes.name for changes in unknown]
    known = (use.changes.name.rpartition(".")[2] for use in uses)
    here = (target.name for target in layout.targets if target.held is Held.HERE)
    said = describe_unknown(names, known, here)
    detail = f"{layout.base_model or 'the base model'} {said}"
    return incompatible(key_of(unknown[0]), "TARGET_UNKNOWN", detail)


def count_added_tokens(uses: Iterable[Use]) -> int:
    """Returns how many rows of the embedding or the head an adapter has behind the base's: of
    tokens that it adds to the vocabulary."""
    num_base, num_saved = 0, 0
    ids: set[int] = set()
    for use in uses:
        changes = use.changes
        is_embedding = use.target.kind is TargetKind.EMBEDDING
        if not isinstance(changes, Replacement) or not (
            is_embedding or use.target.name == OUTPUT_LAYER
        ):
            continue
        num_base = max(num_base, use.target.num_rows)
        if changes.row_ids is None:
            num_saved = max(num_saved, changes.record.shape[0])
        else:
            ids.update(changes.row_ids)
    end = max(num_base, num_saved)
    return end - num_base + sum(token >= end for token in ids)


def _check_added_tokens(uses: Sequence[Use]) -> None:
    """Requires that LoRA of an embedding is of an adapter that adds no tokens: its A has no rows
    for them."""
    for use in uses:
        is_embedding = use.target.kind is TargetKind.EMBEDDING
        if is_embedding and not isinstance(use.changes, Replacement) and count_added_tokens(uses):
            detail = f"{use.target.name} has A and B for {use.target.num_rows} tokens{ADDED_TOKENS}"
            raise incompatible(key_of(use.changes), "SHAPE_MISMATCH", detail)


class _Names:
    """The targets of a layout by name."""

    def __init__(self, layout: Layout) -> None:
        self._targets = layout.targets
        self._own = {target.name: index for index, target in enumerate(layout.targets)}
        self._others: defaultdict[str, list[_Named]] | None = None
        self._transposed: frozenset[str] | None = None

    def find(self, name: str) -> list[_Named]:
        """Returns the targets that a module of this name is, or computes; of a projection of all
        experts also the ones that are named as other trainers do."""
        return self._find(name) or self._find(other_name(name))

    def is_transposed(self, name: str) -> bool:
        """Returns whether the model has the parameter of this name as [experts, in, out]. A layout
        says it of other names, a model of all parameters of a module, in PEFT's eyes, too."""
        if self._transposed is None:
            others = (other for target in self._targets for other in target.other_names)
            self._transposed = frozenset(
                _module_of(other.name) for other in others if other.transposed
            )
        return _module_of(name) in self._transposed

    def expert(self, changes: Changes) -> tuple[Target, ExpertModule] | None:
        """Returns the target of which a module is one expert's; None if it is no such module, or a
        target of its own."""
        if not isinstance(changes, TargetWeights) or changes.kind is not TargetKind.LINEAR:
            return None
        module = expert_module(changes.name)
        if module is None or self._find(changes.name):
            return None
        found = self.find(module.stack)
        target = self._targets[found[0][0]] if found else None
        return (target, module) if target and target.kind is TargetKind.EXPERTS else None

    def _find(self, name: str) -> list[_Named]:
        index = self._own.get(name)
        if index is not None:
            return [(index, None)]
        if self._others is None:  # most adapters need none
            self._others = defaultdict(list)
            for index, target in enumerate(self._targets):
                for other in target.other_names:
                    self._others[other.name].append((index, other))
        return self._others.get(name, [])


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _gathered(changes: Iterable[Changes], names: _Names) -> Iterator[Changes]:
    """Yields the adapter's weights for each module, of experts that the layout has as one target
    together.

    Raises IncompatibleAdapter SHAPE_MISMATCH or KIND_MISMATCH.
    """
    stacks: dict[str, dict[int, TargetWeights]] = {}
    targets: dict[str, Target] = {}
    for each in changes:
        found = names.expert(each)
        if found is None:
            yield each
            continue
        assert isinstance(each, TargetWeights)
        target, (stack, index) = found
        if index >= target.experts:
            detail = f"of expert {index}, {target.name} has {target.experts}"
            raise incompatible(key_of(each), "SHAPE_MISMATCH", detail)
        for record in (each.bias, each.magnitude):
            if record is not None:
                detail = f"{target.name} is of all experts, which have A and B alone"
                raise incompatible(record.key, "KIND_MISMATCH", detail)
        targets[stack] = target
        stacks.setdefault(stack, {})[index] = each
    for stack, experts in stacks.items():
        yield _stacked(stack, experts, targets[stack].experts)


def _stacked(stack: str, experts: Mapping[int, TargetWeights], num_experts: int) -> ExpertWeights:
    """Returns experts that are saved one by one as one module's."""
    records = (record for index in sorted(experts) for record in experts[index].records())
    return ExpertWeights(
        stack,
        stack,
        None,
        1.0,
        num_experts,
        {
            index: (
                Matrix.of(each.a, is_transposed=each.is_transposed),
                Matrix.of(each.b, is_transposed=each.is_transposed),
            )
            for index, each in sorted(experts.items())
        },
        tuple(records),
        scales={index: each.scale for index, each in experts.items()},
    )


def _module_outputs(layout: Layout, found: Iterable[_Named]) -> int:
    """Returns the outputs of a module that computes these targets."""
    return sum(layout.targets[index].out_features for index, _ in found)


def _check_format_1(changes: Changes) -> None:
    if changes.kind in (TargetKind.EXPERTS, TargetKind.VECTOR) or changes.kinds - _PLAIN_KINDS:
        kinds = ", ".join(sorted(kind.value for kind in changes.kinds - _PLAIN_KINDS)) or "experts"
        detail = f"the server reads images of format 1, which have no {kinds}: upgrade it"
        raise incompatible(key_of(changes), "FORMAT_TOO_OLD", detail)


def _check_use(use: Use) -> None:
    target, changes = use.target, use.changes
    is_matrix = isinstance(changes, Replacement) and changes.kind is TargetKind.LINEAR
    if target.kind is not changes.kind and not (is_matrix and target.kind in _MATRICES):
        kind = target.kind.value
        raise incompatible(key_of(changes), "KIND_MISMATCH", f"{target.name} is of kind {kind}")
    if isinstance(changes, TargetWeights):
        _check_lora(use, changes)
    elif isinstance(changes, ExpertWeights):
        _check_experts(use, changes)
    else:
        assert isinstance(changes, Replacement)
        _check_replacement(use, changes)


def _check_lora(use: Use, weights: TargetWeights) -> None:
    target = use.target
    _check_size(use, weights.a.key, weights.a.shape, "in", weights.in_features, target.in_features)
    expected = use.module_outputs or weights.out_features  # its own: of any size
    _check_size(use, weights.b.key, weights.b.shape, "out", weights.out_features, expected)
    for record in (weights.bias, weights.magnitude):
        if record is not None:
            found = record.shape[-1]
            _check_size(use, record.key, record.shape, "out", found, weights.out_features)


def _check_experts(use: Use, experts: ExpertWeights) -> None:
    target = use.target
    if experts.num_experts != target.experts:
        detail = f"{experts.num_experts} experts, {target.name} has {target.experts}"
        raise incompatible(key_of(experts), "SHAPE_MISMATCH", detail)
    for a, b in pairs_of(use, experts).values():
        shape = a.record.shape
        _check_size(use, a.record.key, shape, "in", a.shape[1], target.in_features)
        _check_size(use, b.record.key, b.record.shape, "out", b.shape[0], use.module_outputs)


def _check_replacement(use: Use, replacement: Replacement) -> None:
    target, record = use.target, replacement.record
    if replacement.is_copy and not target.base_hashes:
        raise incompatible(record.key, "BASE_UNKNOWN", SAVED_ALONG)
    is_embedding = target.kind is TargetKind.EMBEDDING
    rows, columns = (1, *record.shape)[-2:]
    if replacement.row_ids is None:
        expected = target.in_features if is_embedding else target.out_features
        if target.kind is TargetKind.VECTOR:
            _check_size(use, record.key, record.shape, "out", columns, expected or columns)
            return
        expected = expected or rows  # its own: of any size
        # Rows behind the base's are of added tokens.
        is_more = rows > expected and _is_vocabulary(target, "in" if is_embedding else "out")
        if not is_more:
            side = "in" if is_embedding else "out"
            _check_size(use, record.key, record.shape, side, rows, expected)
    elif len(replacement.row_ids) != rows:
        detail = f"{rows} rows for {len(replacement.row_ids)} ids"
        raise incompatible(record.key, "SHAPE_MISMATCH", detail)
    side, expected = ("out", target.out_features) if is_embedding else ("in", target.in_features)
    _check_size(use, record.key, record.shape, side, columns, expected)


def pairs_of(use: Use, experts: ExpertWeights) -> dict[int, tuple[Matrix, Matrix]]:
    """Returns A [rank, in] and B [out, rank] of each expert, as the target has them."""
    if not experts.is_parameter:
        return experts.pairs
    a, b = next(iter(experts.pairs.values()))
    found, wanted = (a.shape[1], b.shape[0]), (use.target.in_features, use.module_outputs)
    has_first = experts.order is ParameterOrder.FIRST
    is_turned = experts.order is ParameterOrder.OUTPUTS or (has_first and not use.is_transposed)
    if found[0] != found[1]:
        is_turned = found == wanted[::-1]
    return experts.turned() if is_turned else experts.pairs


def _check_size(
    use: Use, key: str, shape: Iterable[int], side: str, found: int, expected: int
) -> None:
    if found == expected:
        return
    target = use.target
    why = ADDED_TOKENS if _is_vocabulary(target, side) and found > expected else ""
    name = target.name if use.other is None else use.other.name
    detail = f"shape {list(shape)} has {found} {side}_features, {name} has {expected}{why}"
    raise incompatible(key, "SHAPE_MISMATCH", detail)


def _is_vocabulary(target: Target, side: str) -> bool:
    """Returns whether this side of a target has a feature for each token."""
    if target.kind is TargetKind.EMBEDDING:
        return side == "in"
    return side == "out" and target.name == OUTPUT_LAYER


def _check_invocation(checkpoint: Checkpoint, uses: Iterable[Use]) -> None:
    """Requires that an adapter which is active from its invocation tokens on changes nothing that
    pictures pass: the place in a prompt does not say where it is active in a picture."""
    for use in uses:
        if checkpoint.invocation_tokens and use.target.is_of_pictures:
            detail = (
                f"it has invocation tokens (aLoRA) and changes {use.target.name}, which pictures "
                "pass: train it without the modules of towers and connectors in target_modules"
            )
            raise incompatible(key_of(use.changes), "KIND_MISMATCH", detail)


def _check_once(uses: list[Use]) -> None:
    """Requires that no target is changed twice in one way, under different names."""
    for before, use in pairwise(uses):
        if before.column == use.column and type(before.changes) is type(use.changes):
            detail = f"{before.changes.name} changes {use.target.name}, too: save it once"
            raise incompatible(key_of(use.changes), "TARGET_TWICE", detail)


def _check_complete(checkpoint: Checkpoint, layout: Layout, uses: Iterable[Use]) -> None:
    """Requires that every listed module of this model has weights in some layer.

    A list may name modules of other models, and weights may be pruned in some layers; but a module
    that is listed, present in the model and absent from the adapter was lost on the way.
    """
    config = checkpoint.config
    lost = checkpoint.lost_modules
    if not lost:
        return
    ties = config.extras.ties_embeddings
    tied = {use.target.name for use in uses if ties and isinstance(use.changes, TargetWeights)}
    for target in layout.targets:
        if target.name in tied:
            continue
        for name in _names_of(target):
            entry = next((tail for tail in path_tails(name) if tail in lost), None)
            is_embedding = target.kind is TargetKind.EMBEDDING
            if entry is not None and config.selects(name, is_embedding=is_embedding):
                raise IncompatibleAdapter(
                    f"target_modules lists {entry!r}, but the adapter has no weights for it",
                    subject=name,
                    reason="TARGET_MISSING",
                )


def _names_of(target: Target) -> Iterator[str]:
    yield target.name
    yield from (other.name for other in target.other_names)
