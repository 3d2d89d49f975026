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
from inference_svc.model.encoder.operations import RotateHeads
from inference_svc.model.encoder.tiles import TilePart
from inference_svc.model.operations import Op, Rows
from inference_svc.model.tower import Units
from inference_svc.pictures.units import Share
from kernels.attention.native_both_ways import pack_op
from kernels.native.library import Library, NativeOp, Program
from kernels.pictures.native import load_rows_op, store_rows_op

Make = Callable[[Sequence[Op], Sequence[Tensors]], Iterator[GroupedOp]]


class UnitPrograms:
    """The programs of a unit by the groups that adapters change, and the `outs` that they make.
    Before each run it is said which part of which tile they compute. Attention that sees all of a
    tile is a program of its own, which runs before."""

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
        self._reads, self._next = units.mixer(index), units.mixer(index + 1)
        num_windows, num_attending = len(own.windows), len(own.attending)
        made = list(make(ops, places))
        self._windows, self._attending = own.windows[num_windows:], own.attending[num_attending:]
        turns = any(isinstance(op, RotateHeads) for op in ops)
        self._outputs = [
            _Copy(each.outputs, "source", lambda tile: tile.qkv) for each in self._attending
        ]
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
        self._attention: Program | None = None

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
        for copy in (*self._loads, *self._outputs, *self._stores):
            copy.point(tile, part.start)
        for args in self._windows:
            args.qkv = _address(tile.qkv, part.start)
        for op in self._packing:
            packing: Any = op.args
            packing.first, packing.packed = part.start, tile.packed[self._index % 2].args

    def attend(self, library: Library, tile: NativeTile, part: TilePart, share: Share) -> None:
        """Computes a share of a part's attention in place of the queries."""
        if self._attention is None:
            self._attention = library.program([each.op for each in self._attending])
        for _, args, _ in self._attending:
            args.first, args.end = part.start + share.first, part.start + share.end
            args.first_head, args.end_head = share.first_head, share.end_head
            args.qkv, args.out = (_address(tile.qkv, token) for token in (0, args.first))
            args.packed = tile.packed[(self._index - 1) % 2].args
        self._attention.run()

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


def _address(rows: Tensor, start: int) -> int:
    return rows.data_ptr() + start * rows.stride(0) * rows.element_size()
