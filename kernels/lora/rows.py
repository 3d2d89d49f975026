"""Rows of adapters in the table, on the host: which numbers each target has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

GRANULE_BYTES = 256
ABSENT = -1
"""Granule of a matrix or vector that the adapter does not have."""
NO_EXPERT = -1
"""Expert of a target that is not a mixture."""
INDEX_FIELDS = 4
INDEX_BYTES = 4 * INDEX_FIELDS
"""Bytes of an expert in an index."""


class OutputVectors(NamedTuple):
    """Granules of vectors over the outputs of one target of one adapter; see `reference.add_lora`.

    `magnitude` (DoRA's, divided by the norms of the rows that it scales) and `bias` are fp32
    `[out]`. `base_bias`, which replaces the base's bias, is of the arena's dtype.
    """

    magnitude: int = ABSENT
    bias: int = ABSENT
    base_bias: int = ABSENT


NO_VECTORS = OutputVectors()
_SCALING = [OutputVectors._fields.index(name) for name in ("magnitude", "base_bias")]
"""The vectors that change the base's outputs, and do not only add to them."""


class ReplacedWeight(NamedTuple):
    """A base weight that one adapter replaces in part or as a whole: an embedding, the head, or a
    norm's weight. `weight` is its index in the table; the other fields are granules.

    `full` is the whole weight, `[rows, features]` or `[features]`. `row_ids` are int32
    `[num_rows]`, ascending; `rows` `[num_rows, features]` replaces these rows. All except the ids
    are of the arena's dtype.
    """

    weight: int
    full: int = ABSENT
    row_ids: int = ABSENT
    rows: int = ABSENT
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One target of one adapter.

    A is `[a_rank, in_features]` row-major at byte `a_granule * 256` of the arena (an embedding's A
    is `[in_features, a_rank]`, one row per token id); B is `[rank, out_features]` at
    `b_granule * 256`. None: A's rank is B's. Of `num_experts` experts these are segments that begin
    with an index, each expert's matrices are of such shapes, and the ranks are the highest. The
    products with both are multiplied by `scale`.
    """

    target: int
    a_granule: int
    b_granule: int
    rank: int
    in_features: int
    out_features: int
    scale: float = 1.0
    is_embedding: bool = False
    a_rank: int | None = None
    num_experts: int = 0
    vectors: OutputVectors = NO_VECTORS


@dataclass(frozen=True, eq=False, slots=True)
class TableRow:
    """All targets of one adapter, in ascending order, as arrays [n]: see TableEntry.

    Integers are int64, `scales` fp32, `is_embedding` bool. `max_rank` is B's. `vectors` are
    granules [n, 3], in the order of OutputVectors.
    """

    targets: np.ndarray
    a_granules: np.ndarray
    b_granules: np.ndarray
    a_ranks: np.ndarray
    b_ranks: np.ndarray
    in_features: np.ndarray
    out_features: np.ndarray
    scales: np.ndarray
    is_embedding: np.ndarray
    num_experts: np.ndarray
    vectors: np.ndarray
    replaced: tuple[ReplacedWeight, ...] = ()
    target_set: frozenset[int] = field(init=False)
    weight_set: frozenset[int] = field(init=False)
    max_rank: int = field(init=False)
    scaled_set: frozenset[int] = field(init=False)
    """Targets whose outputs of the base it scales, or gives another bias."""
    has_vectors: bool = field(init=False)
    has_rows: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_set", frozenset(self.targets.tolist()))
        object.__setattr__(self, "weight_set", frozenset(each.weight for each in self.replaced))
        object.__setattr__(self, "max_rank", int(self.b_ranks.max(initial=0)))
        present = self.vectors != ABSENT
        object.__setattr__(self, "has_vectors", bool(present.any()))
        scales = present[:, _SCALING].any(axis=1)
        object.__setattr__(self, "scaled_set", frozenset(self.targets[scales].tolist()))
        object.__setattr__(self, "has_rows", any(each.num_rows for each in self.replaced))
        assert len(self.target_set) == len(self.targets), "a target appears twice"
        assert len(self.weight_set) == len(self.replaced), "a weight appears twice"

    @property
    def replaces(self) -> bool:
        """Returns whether it changes the base's outputs, and does not only add to them."""
        return bool(self.scaled_set or self.replaced)

    @classmethod
    def of(cls, entries: Sequence[TableEntry], replaced: Sequence[ReplacedWeight] = ()) -> TableRow:
        entries = sorted(entries, key=lambda entry: entry.target)
        a_ranks = [entry.rank if entry.a_rank is None else entry.a_rank for entry in entries]
        return cls(
            np.array([entry.target for entry in entries], dtype=np.int64),
            np.array([entry.a_granule for entry in entries], dtype=np.int64),
            np.array([entry.b_granule for entry in entries], dtype=np.int64),
            np.array(a_ranks, dtype=np.int64),
            np.array([entry.rank for entry in entries], dtype=np.int64),
            np.array([entry.in_features for entry in entries], dtype=np.int64),
            np.array([entry.out_features for entry in entries], dtype=np.int64),
            np.array([entry.scale for entry in entries], dtype=np.float32),
            np.array([entry.is_embedding for entry in entries], dtype=np.bool_),
            np.array([entry.num_experts for entry in entries], dtype=np.int64),
            np.array([entry.vectors for entry in entries], dtype=np.int64).reshape(-1, 3),
            tuple(replaced),
        )

    def with_others(
        self,
        vectors: Mapping[int, OutputVectors],
        sizes: Mapping[int, tuple[int, int]],
        replaced: tuple[ReplacedWeight, ...],
    ) -> TableRow:
        """Returns the row of an adapter that has these vectors, too, by target, and weights.
        Targets that it has nothing else of join it; `sizes` are their inputs and outputs."""
        missing = sorted(vectors.keys() - self.target_set)
        order = np.argsort(np.concatenate((self.targets, np.array(missing, dtype=np.int64))))
        joining = np.array([sizes[target] for target in missing], dtype=np.int64).reshape(-1, 2)

        def joined(values: np.ndarray, more: np.ndarray | None = None) -> np.ndarray:
            zeros = np.zeros((len(missing), *values.shape[1:]), dtype=values.dtype)
            return np.concatenate((values, zeros if more is None else more))[order]

        targets = joined(self.targets, np.array(missing, dtype=np.int64))
        granules = joined(self.vectors, np.full((len(missing), 3), ABSENT, dtype=np.int64))
        for place, target in enumerate(targets.tolist()):
            if target in vectors:
                granules[place] = vectors[target]
        return TableRow(
            targets=targets,
            a_granules=joined(self.a_granules),
            b_granules=joined(self.b_granules),
            a_ranks=joined(self.a_ranks),
            b_ranks=joined(self.b_ranks),
            in_features=joined(self.in_features, joining[:, 0]),
            out_features=joined(self.out_features, joining[:, 1]),
            scales=joined(self.scales),
            is_embedding=joined(self.is_embedding),
            num_experts=joined(self.num_experts),
            vectors=granules,
            replaced=replaced,
        )


NO_ADAPTER = TableRow.of([])
