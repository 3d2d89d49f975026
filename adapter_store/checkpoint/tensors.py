"""An adapter's tensors: their headers, and the targets that they make up in pairs.

Every tensor belongs to one target, and the config selects every target, and announces its contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from adapter_store.checkpoint.formats.select import find_weight_files
from adapter_store.checkpoint.peft.config import AdapterConfig
from adapter_store.checkpoint.peft.experts import (
    MAX_EXPERTS,
    check_forms,
    check_single,
    may_be_stacked,
    read_stack,
)
from adapter_store.checkpoint.peft.extras import check_vectors, convolution_hint, refused
from adapter_store.checkpoint.peft.module_patterns import OUTPUT_LAYER
from adapter_store.checkpoint.peft.parameters import (
    Parameter,
    find_parameters,
    in_order,
    is_linear,
    read_experts,
)
from adapter_store.checkpoint.peft.tensor_keys import TensorKey, parse_key
from adapter_store.checkpoint.reading.files import (
    AnyFolder,
    CheckpointLimits,
    check_source_bytes,
    open_file,
)
from adapter_store.checkpoint.reading.safetensors import TensorRecord, read_header
from adapter_store.checkpoint.replacements import read_replacements
from adapter_store.checkpoint.weights import Changes, ExpertWeights, Replacement
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import WEIGHTS_FILE
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind

_SIDES = (SegmentKind.A, SegmentKind.B)


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The change of one target by an adapter: delta = scale * B @ A.

    `a` is [rank, in] (an embedding's [rank, vocab]), `b` is [out, rank]; `is_transposed` means [in,
    rank] and [rank, out]. `module` is the target's name in the trained model, and so in the config.
    `alpha` is the source of the scale; None where the config gives the scale itself.
    """

    name: str
    module: str
    kind: TargetKind
    rank: int
    alpha: float | None
    scale: float
    a: TensorRecord
    b: TensorRecord
    bias: TensorRecord | None = None
    magnitude: TensorRecord | None = None
    is_transposed: bool = False

    @property
    def kinds(self) -> frozenset[SegmentKind]:
        """The contents that it needs a server to apply."""
        kinds = {SegmentKind.A, SegmentKind.B}
        if self.bias is not None:
            kinds.add(SegmentKind.BIAS)
        if self.magnitude is not None:
            kinds.add(SegmentKind.MAGNITUDE)
        return frozenset(kinds)

    def records(self) -> Iterator[tuple[str, TensorRecord]]:
        """Yields each saved tensor with its role in the digest."""
        prefix = "embedding_" if self.kind is TargetKind.EMBEDDING else ""
        suffix = "_transposed" if self.is_transposed else ""
        yield f"{prefix}A{suffix}", self.a
        yield f"{prefix}B{suffix}", self.b
        if self.bias is not None:
            yield "B_bias", self.bias
        if self.magnitude is not None:
            yield "magnitude", self.magnitude

    @property
    def in_features(self) -> int:
        """The number of input features; of an embedding, the size of the vocabulary."""
        return self.a.shape[0 if self.is_transposed else 1]

    @property
    def out_features(self) -> int:
        return self.b.shape[1 if self.is_transposed else 0]


def read_tensors(folder: AnyFolder, limits: CheckpointLimits) -> tuple[list[TensorRecord], int]:
    """Reads the headers of the weight files; returns all tensors in order of file and offset, and
    the size of the files.

    Raises InvalidAdapter as `find_weight_files` and `read_header`, and INDEX_MISMATCH;
    LimitExceeded for more than `limits.max_source_bytes`.
    """
    names, index = find_weight_files(folder, limits)
    records: list[TensorRecord] = []
    source_bytes = 0
    for name in names:
        with open_file(folder, name) as file:
            source_bytes += file.size_bytes
            check_source_bytes(name, source_bytes, limits)
            found = read_header(
                file.read_at,
                file.size_bytes,
                name,
                max_header_bytes=limits.max_header_bytes,
                max_tensors=limits.max_tensors - len(records),
            )
        if index is not None:
            _check_index(found, index)
        records += found
    missing = sorted(set(index or ()) - {record.key for record in records})
    if missing:
        raise InvalidAdapter(
            f"{missing[0]} is in the index but in no file",
            subject=missing[0],
            reason="INDEX_MISMATCH",
        )
    return records, source_bytes


def _check_index(records: Iterable[TensorRecord], index: Mapping[str, str]) -> None:
    """Raises InvalidAdapter unless each tensor is in the file that the index names."""
    for record in records:
        if index.get(record.key) != record.file:
            raise InvalidAdapter(
                f"{record.file}: {record.key} is not indexed in this file",
                subject=record.key,
                reason="INDEX_MISMATCH",
            )


@dataclass(frozen=True, slots=True)
class Contents:
    """All that an adapter changes. `targets` are keyed and sorted by name."""

    targets: Mapping[str, TargetWeights]
    experts: tuple[ExpertWeights, ...] = ()
    replacements: tuple[Replacement, ...] = ()

    @property
    def changes(self) -> Iterator[Changes]:
        """The adapter's weights for each module."""
        yield from self.targets.values()
        yield from self.experts
        yield from self.replacements


def read_contents(
    records: Iterable[TensorRecord],
    config: AdapterConfig,
    parse: Callable[[str], TensorKey] = parse_key,
) -> Contents:
    """Returns the contents that the tensors make up. `parse` reads the names of its format.

    Raises InvalidAdapter: TENSOR_UNKNOWN, TENSOR_DUPLICATE, ADAPTERS_MIXED, SHAPE_INVALID,
    PAIR_INCOMPLETE, TARGET_NOT_SELECTED, RANK_MISMATCH or NO_TARGETS, and as `read_stack`,
    `check_single`, `check_forms`, `in_order` and `read_replacements`; the subject is a tensor, a
    key of the config or the weights file.
    """
    pairs: dict[str, dict[SegmentKind, tuple[TensorKey, TensorRecord]]] = {}
    others: list[tuple[TensorKey, TensorRecord]] = []
    adapter_name = ""
    for record in records:
        key = parse(record.key)
        adapter_name = adapter_name or key.adapter_name
        if key.adapter_name not in ("", adapter_name):
            detail = f"of an adapter {key.adapter_name!r}, while others are of {adapter_name!r}"
            raise refused(record, "ADAPTERS_MIXED", detail)
        if key.side in (SegmentKind.FULL, SegmentKind.ROWS):
            others.append((key, record))
        else:
            _add_side(pairs, key, record)
    targets, experts = _pair(pairs, config)
    adapted = frozenset(target.module for target in targets.values())
    replacements = read_replacements(others, config.extras, adapted)
    if not targets and not experts and not replacements:
        raise InvalidAdapter(
            "the adapter changes nothing: it has no tensors",
            subject=WEIGHTS_FILE,
            reason="NO_TARGETS",
        )
    if config.extras.invocation_tokens:
        _check_activation(targets, replacements)
    return Contents(targets, experts, replacements)


def _check_activation(
    targets: Mapping[str, TargetWeights], replacements: Iterable[Replacement]
) -> None:
    """Raises InvalidAdapter CONFIG_UNSUPPORTED for contents that are active before the invocation
    tokens."""
    embeddings = (each.a for each in targets.values() if each.kind is TargetKind.EMBEDDING)
    for record in (*embeddings, *(each.record for each in replacements)):
        raise refused(
            record,
            "CONFIG_UNSUPPORTED",
            "the config has alora_invocation_tokens, and this is also active before them. PEFT "
            "has aLoRA of linear layers only",
        )


_Sides: TypeAlias = Mapping[SegmentKind, tuple[TensorKey, TensorRecord]]


def _pair(
    pairs: Mapping[str, _Sides], config: AdapterConfig
) -> tuple[dict[str, TargetWeights], tuple[ExpertWeights, ...]]:
    """Returns the targets that have A and B, sorted by name."""
    is_tied = config.extras.ties_embeddings and any(
        key.kind is TargetKind.EMBEDDING for sides in pairs.values() for key, _ in sides.values()
    )
    parameters: dict[str, Parameter] = {}
    if config.extras.parameters:
        modules = {
            key.module: record
            for sides in pairs.values()
            for side, (key, record) in sides.items()
            if side is SegmentKind.A and key.kind is TargetKind.LINEAR and not _is_stack(sides)
        }
        parameters = find_parameters(modules, config)
    targets: dict[str, TargetWeights] = {}
    experts: list[ExpertWeights] = []
    stacks: list[ExpertWeights] = []
    left = MAX_EXPERTS
    for name in sorted(pairs):
        sides = pairs[name]
        parameter = parameters and parameters.get(next(key.module for key, _ in sides.values()))
        if _is_stack(sides):
            stacks.append(_experts(name, sides, config, None, left))
            left -= stacks[-1].num_experts
        elif not parameter:
            is_tied_head = is_tied and name == OUTPUT_LAYER
            targets[name] = _target(name, sides.values(), config, is_selected=is_tied_head)
        elif is_linear(parameter, _both_sides(name, sides.values())[SegmentKind.A], config):
            targets[name] = _target(name, sides.values(), config, parameter)
        else:
            experts.append(_experts(name, sides, config, parameter, left))
            left -= experts[-1].num_experts
    single = check_single((name, each.a) for name, each in targets.items())
    check_forms(stacks, experts, single)
    found = (*in_order(experts, config.extras.parameter_order), *stacks)
    return targets, tuple(sorted(found, key=lambda each: each.name))


def _is_stack(sides: _Sides) -> bool:
    """Returns whether A or B of all experts is one tensor."""
    return any(len(record.shape) > 2 for _, record in sides.values())


def _experts(
    name: str, sides: _Sides, config: AdapterConfig, parameter: Parameter | None, max_experts: int
) -> ExpertWeights:
    """Returns A and B of all experts: of a parameter, or in stacks."""
    by_side = _both_sides(name, sides.values())
    a, b = by_side[SegmentKind.A], by_side[SegmentKind.B]
    if parameter is None:
        found = read_stack(sides[SegmentKind.A][0], a, b, config, max_experts)
    bias, magnitude = map(by_side.get, (SegmentKind.BIAS, SegmentKind.MAGNITUDE))
    check_vectors(config.extras, TargetKind.EXPERTS, a, b.shape[0], bias, magnitude)
    if parameter is not None:
        found = read_experts(parameter, a, b, config, max_experts)
    return found


def _add_side(
    pairs: dict[str, dict[SegmentKind, tuple[TensorKey, TensorRecord]]],
    key: TensorKey,
    record: TensorRecord,
) -> None:
    """Adds a tensor to its target's."""
    num_dimensions = 2 if key.side in _SIDES else 1
    is_stack = (
        num_dimensions == 2
        and len(record.shape) == 3
        and key.kind is TargetKind.LINEAR
        and may_be_stacked(key.target)
    )
    if len(record.shape) != num_dimensions and not is_stack:
        what = "matrix" if num_dimensions == 2 else "vector"
        hint = convolution_hint(key, record, "target_modules")
        raise refused(record, "SHAPE_INVALID", f"shape {list(record.shape)} is not a {what}{hint}")
    sides = pairs.setdefault(key.target, {})
    for other, _ in sides.values():
        is_other_kind = None not in (key.kind, other.kind) and key.kind is not other.kind
        if key.side is other.side or key.module != other.module or is_other_kind:
            detail = f"{key.target} has another tensor for this"
            raise refused(record, "TENSOR_DUPLICATE", detail)
    sides[key.side] = (key, record)


def _both_sides(
    name: str, sides: Iterable[tuple[TensorKey, TensorRecord]]
) -> dict[SegmentKind, TensorRecord]:
    """Returns the tensors by side; raises InvalidAdapter PAIR_INCOMPLETE without A or B."""
    by_side = {key.side: record for key, record in sides}
    for side in _SIDES:
        if side not in by_side:
            record = next(iter(by_side.values()))
            raise refused(record, "PAIR_INCOMPLETE", f"{name} has no {side.value.upper()} for it")
    return by_side


def _target(
    name: str,
    sides: Iterable[tuple[TensorKey, TensorRecord]],
    config: AdapterConfig,
    parameter: Parameter | None = None,
    *,
    is_selected: bool = False,
) -> TargetWeights:
    """Returns the target that has A and B for a module, or for a parameter that is its weight.
    `is_selected`: the config adapts it without naming it."""
    by_side = _both_sides(name, sides)
    key = next(key for key, _ in sides if key.kind is not None)
    module, kind, is_transposed = key.module, key.kind, key.is_transposed
    assert kind is not None
    a, b = by_side[SegmentKind.A], by_side[SegmentKind.B]
    is_selected |= parameter is not None
    if not is_selected and not config.selects(module, is_embedding=kind is TargetKind.EMBEDDING):
        raise refused(
            a, "TARGET_NOT_SELECTED", f"the config does not adapt {module}, so it would stay unused"
        )
    rank, alpha, scale = config.settings_for(parameter.path if parameter else module)
    of_a, of_b = (1, 0) if is_transposed else (0, 1)
    for record, found in ((a, a.shape[of_a]), (b, b.shape[of_b])):
        if found != rank:
            raise refused(
                record,
                "RANK_MISMATCH",
                f"shape {list(record.shape)} has rank {found}, but the config has {rank}",
            )
    weights = TargetWeights(
        name,
        module,
        kind,
        rank,
        alpha,
        scale,
        a,
        b,
        by_side.get(SegmentKind.BIAS),
        by_side.get(SegmentKind.MAGNITUDE),
        is_transposed=is_transposed,
    )
    check_vectors(config.extras, kind, a, weights.out_features, weights.bias, weights.magnitude)
    return weights
