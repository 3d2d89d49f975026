"""The programs of a tower's units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from inference_svc.backends.native.adapter_ops import GroupedOp, is_in
from inference_svc.backends.native.encoder import Tensors
from inference_svc.backends.native.towers.operations import TowerOps
from inference_svc.backends.native.towers.tiles import NativeTile, TileLayout
from inference_svc.model.description import BothWays
from inference_svc.model.encoder.operations import AttendBothWays, RotateHeads
from inference_svc.model.encoder.tiles import TilePart
from inference_svc.model.operations import Op, Rows
from inference_svc.model.tower import Units
from kernels.attention.native_both_ways import pack_op
from kernels.native.library import Library, NativeOp, Program
from kernels.pictures.native import load_rows_op, store_rows_op

Make = Callable[[Sequence[Op], Sequence[Tensors]], Iterator[GroupedOp]]


class UnitPrograms:
    """The programs of a unit by the groups that adapters change, and the `outs` that they make.
    Before each run it is said which part of which tile they compute."""

    def __init__(
        self,
        tiles: TileLayout,
        index: int,
        units: Units,
        places: Sequence[Tensors],
        make: Make,
        own: TowerOps,
    ) -> None:
        ops = [op for op, _ in units.ops[index]]
        at = {value: tensor for each in places for value, tensor in each.items()}
        self.outs = [(out, at[out]) for out in units.outs if any(op.out is out for op in ops)]
        self._index, self._count = index, own.part.count(Rows.TOKENS)
        self._reads, self._next = _mixer(units, index), _mixer(units, index + 1)
        num_attending = len(own.attending)
        made = list(make(ops, places))
        self._attending = own.attending[num_attending:]
        turns = any(isinstance(op, RotateHeads) for op in ops)
        self._loads = [
            _Copy(load_rows_op(rows, self._count), "source", of)
            for rows, of in tiles.kept(has_angles=turns)
            if self._reads is not None
        ]
        self._stores = [
            _Copy(store_rows_op(rows, self._count), "target", of)
            for rows, of in tiles.kept(has_angles=self._reads is None)
            if self._next is not None
        ]
        self._packing: list[NativeOp] = []
        if self._next is not None:
            last = max(place for place, op in enumerate(ops) if op.out is units.qkv)
            self._keep(places[last][units.qkv], self._next)
        moved = ([("", each.op) for each in copies] for copies in (self._loads, self._stores))
        before, after = moved
        self._ops = [*before, *made, *after, *(("", op) for op in self._packing)]
        self._programs: dict[frozenset[str], Program] = {}

    def _keep(self, qkv: Tensor, reader: BothWays) -> None:
        """Stores what the attention of the next unit reads: of windows all, and else queries, and
        packed keys and values."""
        own = qkv if reader.in_windows else qkv[:, : reader.size]
        store = store_rows_op(own, self._count)
        self._stores.append(_Copy(store, "target", lambda tile: tile.qkv))
        if not reader.in_windows:
            self._packing.append(pack_op(qkv, reader.num_heads, self._count))

    def point(self, tile: NativeTile, part: TilePart) -> None:
        """Says which part of which tile the next run computes."""
        for copy in (*self._loads, *self._stores):
            copy.point(tile, part.start)
        for args in self._attending:
            assert self._reads is not None
            if self._reads.in_windows:
                args.qkv = _address(tile.qkv, part.start)
            else:
                args.qkv, args.first, args.end = _address(tile.qkv, 0), part.start, part.end
                args.packed = tile.packed[(self._index - 1) % 2].args
        for op in self._packing:
            packing: Any = op.args
            packing.first, packing.packed = part.start, tile.packed[self._index % 2].args

    def program(self, library: Library, groups: frozenset[str]) -> Program:
        if groups not in self._programs:
            ops = [op for group, op in self._ops if is_in(group, groups)]
            self._programs[groups] = library.program(ops)
        return self._programs[groups]


class _Copy(NamedTuple):
    """A copy of a part's rows: the one of its addresses that is of a tile, in the rows that `of`
    returns."""

    op: NativeOp
    address: str
    of: Callable[[NativeTile], Tensor]

    def point(self, tile: NativeTile, start: int) -> None:
        """Says which tile it is, and the part's first token."""
        setattr(self.op.args, self.address, _address(self.of(tile), start))


def _mixer(units: Units, index: int) -> BothWays | None:
    """Returns the attention that a unit begins with; none before the first layer, and behind the
    last."""
    first = units.ops[index][0][0] if index < len(units.ops) else None
    return first.mixer if isinstance(first, AttendBothWays) else None


def _address(rows: Tensor, start: int) -> int:
    return rows.data_ptr() + start * rows.stride(0) * rows.element_size()
