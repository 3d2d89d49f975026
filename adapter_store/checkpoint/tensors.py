"""Pairing: every tensor is the A or B of one target, and every target is what the config says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adapter_store.checkpoint.files import WEIGHTS_FILE
from adapter_store.checkpoint.keys import TensorKey, parse_key
from adapter_store.checkpoint.peft_config import AdapterConfig
from adapter_store.core import DataType, SegmentKind, TargetKind
from adapter_store.errors import InvalidAdapter


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies: bytes [offset, offset + length_bytes) of `file`, row-major."""

    key: str
    file: str
    dtype: DataType
    shape: tuple[int, ...]
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What an adapter does to one target: delta = scale * B @ A.

    `a` is [rank, in] (an embedding's [rank, vocab]), `b` is [out, rank]. `module` is what the
    trained model, and so the config, calls the target.
    """

    name: str
    module: str
    kind: TargetKind
    rank: int
    alpha: float
    scale: float
    a: TensorRecord
    b: TensorRecord

    @property
    def in_features(self) -> int:
        """For an embedding: the vocabulary."""
        return self.a.shape[1]

    @property
    def out_features(self) -> int:
        return self.b.shape[0]


def pair_targets(
    records: Mapping[str, TensorRecord], config: AdapterConfig
) -> dict[str, TargetWeights]:
    """The adapter's targets by name, sorted.

    Raises InvalidAdapter: TENSOR_UNKNOWN, TENSOR_DUPLICATE, ADAPTERS_MIXED, SHAPE_INVALID,
    PAIR_INCOMPLETE, TARGET_NOT_SELECTED, RANK_MISMATCH or NO_TARGETS; the subject is a tensor or
    the weights file.
    """
    pairs: dict[str, dict[SegmentKind, tuple[TensorKey, TensorRecord]]] = {}
    adapter_name = ""
    for record in records.values():
        key = parse_key(record.key)
        adapter_name = adapter_name or key.adapter_name
        if key.adapter_name != adapter_name:
            detail = f"of an adapter {key.adapter_name!r} beside those of {adapter_name!r}"
            raise _invalid(record, "ADAPTERS_MIXED", detail)
        if len(record.shape) != 2:
            raise _invalid(record, "SHAPE_INVALID", f"shape {list(record.shape)} is not a matrix")
        sides = pairs.setdefault(key.target, {})
        other = next((k for k, _ in sides.values()), key)
        if key.side in sides or (key.kind, key.module) != (other.kind, other.module):
            raise _invalid(record, "TENSOR_DUPLICATE", f"{key.target} has another tensor for this")
        sides[key.side] = (key, record)
    if not pairs:
        raise InvalidAdapter(
            "the adapter changes nothing: it has no tensors",
            subject=WEIGHTS_FILE,
            reason="NO_TARGETS",
        )
    return {name: _target(name, pairs[name].values(), config) for name in sorted(pairs)}


def _target(
    name: str, sides: Iterable[tuple[TensorKey, TensorRecord]], config: AdapterConfig
) -> TargetWeights:
    by_side = {key.side: record for key, record in sides}
    module, kind = next((key.module, key.kind) for key, _ in sides)
    for side, other in ((SegmentKind.A, SegmentKind.B), (SegmentKind.B, SegmentKind.A)):
        if side not in by_side:
            raise _invalid(
                by_side[other], "PAIR_INCOMPLETE", f"{name} has no {side.value.upper()} for it"
            )
    a, b = by_side[SegmentKind.A], by_side[SegmentKind.B]
    if not config.selects(module, is_embedding=kind is TargetKind.EMBEDDING):
        raise _invalid(
            a, "TARGET_NOT_SELECTED", f"the config does not adapt {module}, so it would stay unused"
        )
    rank = config.rank_of(module)
    for record, found in ((a, a.shape[0]), (b, b.shape[1])):
        if found != rank:
            raise _invalid(
                record,
                "RANK_MISMATCH",
                f"shape {list(record.shape)} has rank {found}, the config says {rank}",
            )
    alpha = config.alpha_of(module)
    return TargetWeights(name, module, kind, rank, alpha, config.scale_of(rank, alpha), a, b)


def _invalid(record: TensorRecord, reason: str, detail: str) -> InvalidAdapter:
    return InvalidAdapter(f"{record.key}: {detail}", subject=record.key, reason=reason)
