"""The weights of the modules that an adapter changes, as views of saved tensors.

A module may be a target of a layout, or compute several of them; which, is for the plan to find out
(see adapter_store.images.plan.fit). `module` is its name in the trained model, and so in the
config.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from adapter_store.checkpoint.reading.safetensors import TensorRecord
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind


class Changes(Protocol):
    """An adapter's weights for one module."""

    @property
    def name(self) -> str:
        """The module's canonical name."""

    @property
    def module(self) -> str: ...
    @property
    def kind(self) -> TargetKind: ...
    @property
    def rank(self) -> int:
        """0 without A and B; of experts the largest."""

    @property
    def kinds(self) -> frozenset[SegmentKind]:
        """The contents that it needs a server to apply."""

    def records(self) -> Iterator[tuple[str, TensorRecord]]:
        """Yields each saved tensor with its role in the digest."""


class Matrix(NamedTuple):
    """A saved matrix, or rows and columns of it, or of one of a saved stack of matrices, which
    begins at `offset` of the file. `is_transposed`: the matrix that is meant is its transpose."""

    record: TensorRecord
    offset: int
    num_columns: int
    rows: range
    columns: range
    is_transposed: bool = False

    @classmethod
    def of(cls, record: TensorRecord, index: int = 0, *, is_transposed: bool = False) -> Matrix:
        """All of a record, a vector as a matrix of one row, or the matrix at `index` of a stack."""
        num_rows, num_columns = (1, *record.shape)[-2:]
        offset = record.offset + index * num_rows * num_columns * record.dtype.itemsize
        return cls(record, offset, num_columns, range(num_rows), range(num_columns), is_transposed)

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the matrix that is meant."""
        shape = len(self.rows), len(self.columns)
        return shape[::-1] if self.is_transposed else shape

    @property
    def transposed(self) -> Matrix:
        return Matrix(
            self.record,
            self.offset,
            self.num_columns,
            self.rows,
            self.columns,
            not self.is_transposed,
        )

    def part(self, rows: range, columns: range) -> Matrix:
        """Returns these rows and columns of the matrix that is meant."""
        if self.is_transposed:
            rows, columns = columns, rows
        return Matrix(
            self.record,
            self.offset,
            self.num_columns,
            self.rows[rows.start : rows.stop : rows.step],
            self.columns[columns.start : columns.stop : columns.step],
            self.is_transposed,
        )


class ParameterOrder(enum.Enum):
    """The features of A of a parameter, [experts, first, second]: the inputs or the outputs, by the
    model, or the first dimension, whichever that is."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    FIRST = "first"


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A and B of each expert, [rank, in] and [out, rank], by the expert's index; an expert that the
    adapter lacks is absent. Parameters of PEFT leave open which of the two is which: see `turned`;
    where their sizes do not tell, `order` does. `num_experts` is how many the adapter was trained
    for. `scales` are of experts whose scale is another."""

    name: str
    module: str
    alpha: float | None
    scale: float
    num_experts: int
    pairs: dict[int, tuple[Matrix, Matrix]]
    tensors: tuple[tuple[str, TensorRecord], ...]
    is_parameter: bool = False
    order: ParameterOrder = ParameterOrder.INPUTS
    scales: Mapping[int, float] = field(default_factory=dict)

    kind = TargetKind.EXPERTS
    kinds = frozenset({SegmentKind.A, SegmentKind.B})

    @property
    def rank(self) -> int:
        return max(a.shape[0] for a, _ in self.pairs.values())

    def turned(self) -> dict[int, tuple[Matrix, Matrix]]:
        """Returns the pairs of a parameter of which A has the outputs."""
        return {index: (b.transposed, a.transposed) for index, (a, b) in self.pairs.items()}

    def records(self) -> Iterator[tuple[str, TensorRecord]]:
        yield from self.tensors


@dataclass(frozen=True, slots=True)
class Replacement:
    """A weight that takes the place of the base's: all of it, or the rows `row_ids`, one for each
    of its own. A matrix is of kind LINEAR, also one of an embedding. `is_copy`: its trainer saved
    it along, and it is likely to be the base's. `shared_by` are modules that have the same rows
    without a tensor of their own, by the ends of their names: of a tied head."""

    name: str
    module: str
    kind: TargetKind
    record: TensorRecord
    row_ids: tuple[int, ...] | None = None
    is_copy: bool = False
    shared_by: tuple[str, ...] = ()

    rank = 0

    @property
    def is_whole(self) -> bool:
        """Whether it was trained as a whole."""
        return self.row_ids is None and not self.is_copy

    @property
    def kinds(self) -> frozenset[SegmentKind]:
        """All of it may turn out to be equal, but for some rows."""
        if self.row_ids is None:
            return frozenset({SegmentKind.FULL})
        return frozenset({SegmentKind.ROW_IDS, SegmentKind.ROWS})

    def records(self) -> Iterator[tuple[str, TensorRecord]]:
        role = "copy" if self.is_copy else "full"
        yield role if self.row_ids is None else "rows", self.record
