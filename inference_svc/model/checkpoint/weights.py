"""Reads a model directory's safetensors, or GGUF file, into the decoder's buffers, in one pass.

Each tensor is read once, in the order of its file, and goes to its place at once: into the form
that a backend computes with, of a projection too. There is no second copy of anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.parameters import Parameter, Piece, Role, has_values, role_of
from inference_svc.model.checkpoint.parts import Part
from inference_svc.model.checkpoint.tensors import (
    Source,
    Stored,
    TextTensor,
    check_tensors,
    opened,
)
from inference_svc.model.description import (
    EMBED_TOKENS,
    Attention,
    Decoder,
    Norm,
    NormKind,
    WeightPart,
)
from inference_svc.model.layers import Linear
from inference_svc.model.operations import (
    EMBEDDING_KEY,
    HEAD_KEY,
    Logits,
    Numbers,
    Scalar,
    Table,
    Weight,
    WeightSpec,
    norm_bias,
    norm_key,
    weight_key,
)
from inference_svc.model.quantised.scheme import Rows, StoredMatrix
from inference_svc.model.walk import operations, weights_of
from kernels.attention import HeadNorms
from kernels.elementwise import NormWeight
from kernels.quantised import quantise

BLOCK_ELEMENTS = 1 << 24
"""The most elements of a matrix that are read at once: 64 MiB in fp32."""


class Packed(Protocol):
    """A projection's weight in the form that a backend computes with."""

    @property
    def num_bytes(self) -> int: ...

    def put_rows(self, start: int, rows: Rows) -> None:
        """Takes rows [N, in] of a file as the rows from `start` on: plain ones of any float dtype,
        which are quantised where their part has a format, or of that format."""

    def put_bias(self, start: int, values: Tensor) -> None:
        """Takes values [N] of a file, of any float dtype, as the bias's from `start` on."""


P = TypeVar("P", bound=Packed)
P_co = TypeVar("P_co", bound=Packed, covariant=True)


class Projections(Protocol[P_co]):
    """Makes a backend's projections."""

    def empty(
        self,
        parts: Sequence[WeightPart],
        in_features: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> P_co:
        """Allocates one whose rows are put later, each once, in any order: of `parts`, one below
        the other, each in its format."""

    def of(self, weight: Tensor) -> P_co:
        """Returns a projection of a weight [out, in] that stays where it is, and may be shared."""


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[P]):
    """All weights of a decoder, by the keys of its parameters. `num_bytes` counts bytes in memory:
    a tied head that shares the embedding's tensor is counted once.

    `tables` are [rows, size] in the model's `dtype`, `numbers` fp32 [size]; `projections` have the
    head's even if it is tied, and `norms` have one for every norm of the decoder.
    """

    dtype: torch.dtype
    tables: Mapping[str, Tensor]
    projections: Mapping[str, P]
    norms: Mapping[str, NormWeight]
    scalars: Mapping[str, float]
    numbers: Mapping[str, Tensor]
    num_bytes: int

    @classmethod
    def made(
        cls,
        decoder: Decoder,
        make: Callable[[WeightSpec], Any],
        dtype: torch.dtype,
        num_bytes: int = 0,
    ) -> ModelWeights[P]:
        """Returns weights of a model's dtype that are made one by one, of a tied head too."""
        of_role: dict[Role, dict[str, Any]] = {role: {} for role in Role}
        heads = (op.projection for op in operations(decoder).head if isinstance(op, Logits))
        for weight in (*weights_of(decoder), *(Weight(each, None) for each in heads)):
            of_kind = of_role[role_of(weight.spec)]
            key = weight_key(weight)
            if key not in of_kind:
                of_kind[key] = make(weight.spec)
        tables = of_role[Role.TABLE]
        if not decoder.has_embedding:
            tables[EMBEDDING_KEY] = make(Table(EMBEDDING_KEY, EMBED_TOKENS, 0, decoder.hidden_size))
        return cls.of_roles(of_role, dtype, num_bytes)

    @classmethod
    def of_roles(
        cls, made: Mapping[Role, dict[str, Any]], dtype: torch.dtype, num_bytes: int
    ) -> ModelWeights[P]:
        """Returns weights by the roles of their parameters."""
        return cls(
            dtype=dtype,
            tables=made[Role.TABLE],
            projections=made[Role.PROJECTION],
            norms=made[Role.NORM],
            scalars=made[Role.SCALAR],
            numbers=made[Role.NUMBERS],
            num_bytes=num_bytes,
        )

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size] in the model's dtype; without rows where it is of another
        stage."""
        return self.tables[EMBEDDING_KEY]

    def norm(self, norm: Norm | None, layer: int | None) -> NormWeight | None:
        """Returns the weight of a norm of a layer or, None, of the whole model."""
        return None if norm is None else self.norms[norm_key(norm, layer)]

    def numbers_of(self, spec: Numbers | None) -> Tensor | None:
        """Returns fp32 [size]; None for None."""
        return None if spec is None else self.numbers[spec.name]

    def scale(self, scale: float | Scalar) -> float:
        """Returns a number that may be a weight."""
        return self.scalars[scale.name] if isinstance(scale, Scalar) else scale

    def head_norms(self, attention: Attention, layer: int | None) -> HeadNorms:
        """Returns the norms of queries, keys and values."""
        norms = (attention.q_norm, attention.k_norm, attention.v_norm)
        found = [self.norm(each, layer) for each in norms]
        [eps] = {norm.eps for norm in found if norm is not None} or {0.0}
        q, k, v = (None if norm is None else norm.weight for norm in found)
        return HeadNorms(q, k, v, eps, attention.norms_rotated)


def load_weights(
    model_dir: Path,
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device | str,
    projections: Projections[P],
) -> ModelWeights[P]:
    """Reads `model.safetensors`, or the shards of `model.safetensors.index.json`, cast to `dtype`.

    Allocates nothing but the weights, and holds pages of one tensor of a file at a time, which are
    the system's to take back. Raises as `check_tensors`, before anything large is allocated, and
    UnsupportedModel for quantised weights whose values cannot be meant.
    """
    sources = check_tensors(model_dir, decoder)
    assembly = _Assembly(decoder, dtype, torch.device(device), projections)
    left = Counter(source.parameter.key for source in sources)
    for source in sources:
        left[source.parameter.key] -= 1
        assembly.add(source, is_last=not left[source.parameter.key])
    return assembly.finish()


class _Assembly(Generic[P]):
    """Puts tensors, in any order, into parameters, and these into a decoder's weights."""

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        device: torch.device,
        projections: Projections[P],
    ) -> None:
        self._decoder, self._dtype, self._device = decoder, dtype, device
        self._projections = projections
        self._reading: dict[str, Any] = {}
        self._made: dict[Role, dict[str, Any]] = {role: {} for role in Role}
        self._num_bytes = 0

    def add(self, source: Source, *, is_last: bool) -> None:
        """Reads a piece of a parameter, and finishes this behind its last piece."""
        parameter, piece = source.parameter, source.piece
        made = self._reading.get(parameter.key)
        if made is None:
            made = self._reading[parameter.key] = self._empty(parameter)
        if source.piece.is_unused:
            pass
        elif source.matrix is not None:
            _put_matrix(made, piece, source.matrix, source.tensors)
        else:
            _put_plain(made, piece, source.tensors[""])
        if is_last:
            del self._reading[parameter.key]
            self._made[parameter.role][parameter.key] = self._finished(parameter, made)

    def _empty(self, parameter: Parameter) -> Any:
        """Allocates a parameter."""
        if parameter.role is Role.PROJECTION:
            return self._projections.empty(
                parameter.parts,
                parameter.in_size,
                has_bias=parameter.has_bias,
                dtype=self._dtype,
                device=self._device,
            )
        inner = (parameter.in_size,) if parameter.in_size else ()
        is_wide = parameter.role is Role.NUMBERS
        is_wide |= parameter.norm is not None and parameter.norm.is_wide
        dtype = torch.float32 if is_wide else self._dtype
        return torch.empty(parameter.num_rows, *inner, dtype=dtype, device=self._device)

    def _finished(self, parameter: Parameter, made: Any) -> object:
        """Returns a parameter as the weights have it, of which all has been read."""
        if parameter.role is Role.PROJECTION:
            self._num_bytes += made.num_bytes
            return made
        if parameter.role is Role.SCALAR:
            return float(made)
        self._num_bytes += made.nbytes
        norm = parameter.norm
        if norm is None:
            return made
        made += norm.weight_offset
        made *= norm.weight_scale
        return NormWeight(made, norm.eps, norm.kind is NormKind.LAYER, norm.weight_offset)

    def finish(self) -> ModelWeights[P]:
        """Returns the weights; every tensor must have been added."""
        assert not self._reading
        made, decoder = self._made, self._decoder
        tables = made[Role.TABLE]
        if decoder.head.is_shared and decoder.has_head:
            head = self._projections.of(tables[EMBEDDING_KEY])
            made[Role.PROJECTION][HEAD_KEY] = head
            if not isinstance(head, Linear):
                self._num_bytes += head.num_bytes
                if not decoder.has_embedding:
                    self._num_bytes -= tables[EMBEDDING_KEY].nbytes
        if not decoder.has_embedding:
            size = 0, decoder.hidden_size
            tables[EMBEDDING_KEY] = torch.empty(size, dtype=self._dtype, device=self._device)
        norms = made[Role.NORM]
        for spec, layer in weights_of(self._decoder):
            if isinstance(spec, Table):
                for row, other in spec.copies:
                    tables[spec.key][row] = tables[spec.key][other]
            if not isinstance(spec, Norm):
                continue
            key, bias = norm_key(spec, layer), norm_bias(spec, layer)
            if not has_values(spec):
                norms[key] = ones(spec, self._dtype, self._device)
            if bias is not None:
                norms[key] = norms[key]._replace(bias=made[Role.NUMBERS][bias.name])
        return ModelWeights.of_roles(made, self._dtype, self._num_bytes)


def _put_plain(made: Any, piece: Piece, tensor: TextTensor) -> None:
    """Reads a tensor, a matrix by ranges of rows and experts one by one: all of it may be
    gigabytes."""
    if piece.is_elsewhere:
        _put_zeros(made, piece)
        return
    reads_parts = piece.num_experts > 0 or piece.part is not None
    with opened(tensor, reads_parts=reads_parts) as stored:
        if not tensor.shape:  # one number
            made.copy_(stored)
        elif piece.num_experts and piece.put is not None:
            for place, expert in piece.places:
                piece.put(made, _of_rank(_of_expert(stored, piece, expert), piece), place)
        elif piece.is_transposed and piece.put is not None:
            piece.put(made, stored[:].t(), 0)
        elif piece.put is not None:
            for rows, place in _row_ranges(piece):
                piece.put(made, _of_rank(stored[_index(rows, piece.read_part)], piece), place)
        elif piece.part is not None or piece.shape == made.shape:
            values = made.view(-1, *piece.shape[1:])
            for rows, place in _row_ranges(piece):
                values[place : place + rows.stop - rows.start].copy_(stored[rows])
        else:
            made.copy_(stored[:].view_as(made))


def _of_rank(rows: Tensor, piece: Piece) -> Rows:
    """Returns the columns that are needed, quantised if that was not possible without the others:
    ranks have the codes and scales of the whole."""
    if piece.read_part == piece.part:
        return rows
    assert piece.format is not None
    return _chosen_columns(quantise(rows, piece.format), piece.part)


def _put_zeros(made: Any, piece: Piece) -> None:
    """Puts zeros in the place of a bias that another rank adds."""
    assert piece.put is not None
    size = piece.shape[-1] if piece.part is None else piece.part.num_rows
    for place in range(1 if piece.experts is None else piece.experts.size):
        piece.put(made, torch.zeros(size), place)


def _of_expert(stored: Stored, piece: Piece, expert: int) -> Tensor:
    """Reads an expert's matrix [out, in], or its bias [out], or the part of it that is needed."""
    part = piece.read_part
    if part is None:
        values = stored[expert]
        return values.t() if piece.is_transposed else values
    found = []
    for start, end in part.rows:
        index = _index(slice(start, end), part)
        if piece.is_transposed:
            index = (index if isinstance(index, tuple) else (index, slice(None)))[::-1]
        values = stored[(expert, *(index if isinstance(index, tuple) else (index,)))]
        found.append(values.t() if piece.is_transposed else values)
    return found[0] if len(found) == 1 else torch.cat(found)


def _index(rows: slice, part: Part | None) -> slice | tuple[slice, slice]:
    """Returns the index of rows of a tensor, of their columns that are needed."""
    if part is None or part.columns is None:
        return rows
    return rows, slice(*part.columns)


def _row_ranges(piece: Piece) -> Iterator[tuple[slice, int]]:
    """Yields ranges of the first dimension that are needed, in order, of at most BLOCK_ELEMENTS,
    and the place of each."""
    step = max(1, BLOCK_ELEMENTS // max(1, math.prod(piece.shape[1:])))
    place = 0
    for first, end in ((0, piece.shape[0]),) if piece.part is None else piece.part.rows:
        for start in range(first, end, step):
            rows = slice(start, min(start + step, end))
            yield rows, place
            place += rows.stop - rows.start


def _put_matrix(
    made: Any, piece: Piece, matrix: StoredMatrix, tensors: Mapping[str, TextTensor]
) -> None:
    """Reads the tensors of a quantised weight, by ranges of rows where these can be decoded
    alone, and experts one by one."""
    assert piece.put is not None
    parts: Iterable[tuple[int, Any]] = [(0, ...)]
    if piece.num_experts:
        parts = piece.places
    elif matrix.is_by_rows:
        parts = ((place, rows) for rows, place in _row_ranges(piece))
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for end, each in tensors.items():
            # One value may have no dimensions; see `TensorSpec.fits`.
            reads_parts = piece.num_experts > 0 and len(each.shape) > 0
            found = stack.enter_context(opened(each, reads_parts=reads_parts))
            stored[end] = found if each.shape else found[...].reshape(1)
        for place, index in parts:
            try:
                rows = matrix.decode({end: each[index] for end, each in stored.items()})
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{piece.module}: {error}") from None
            if piece.part is not None and (piece.num_experts or not matrix.is_by_rows):
                rows = _chosen_rows(rows, piece.part)
            piece.put(made, _chosen_columns(rows, piece.part), place)


def _chosen_rows(rows: Rows, part: Part) -> Rows:
    """Returns the rows that are needed, of all."""
    chosen = torch.cat([torch.arange(*each) for each in part.rows])
    return rows[chosen]


def _chosen_columns(rows: Rows, part: Part | None) -> Rows:
    """Returns the columns that are needed, of all."""
    if part is None or part.columns is None:
        return rows
    if isinstance(rows, Tensor):
        return rows[:, slice(*part.columns)]
    return rows.columns(*part.columns)


def ones(norm: Norm, dtype: torch.dtype, device: torch.device) -> NormWeight:
    """Returns a norm that has no weight of its own."""
    weight = torch.ones(norm.size, dtype=torch.float32 if norm.is_wide else dtype, device=device)
    return NormWeight(weight, norm.eps, norm.kind is NormKind.LAYER)
