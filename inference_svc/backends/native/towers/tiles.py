"""The memory of a tile that is being computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.backends.native.encoder import Tensors, angles_of
from inference_svc.model.description import BothWays, Decoder
from inference_svc.model.encoder.tiles import TilePlan
from inference_svc.model.encoder.towers import attention_of
from inference_svc.model.operations import Value
from inference_svc.model.tower import TileState, Units
from kernels.attention.native_both_ways import BothWaysShape, PackedCells
from kernels.host_memory import row_stride


@dataclass(slots=True)
class NativeTile(TileState):
    """The stream [tokens, size], and queries, keys and values [tokens, 3 * size]. Layers without
    windows have only queries there, whose place the outputs of attention take; their keys and
    values are `packed`, of the last two layers, as each reads the one before. `angles` are cos and
    sin of each rotation, [tokens, half]."""

    hidden: Tensor
    qkv: Tensor
    angles: Mapping[Value, tuple[Tensor, Tensor]]
    packed: tuple[PackedCells, ...]


class TileLayout(NamedTuple):
    """A part's values that outlast a unit, in the workspace: the stream, queries, keys and values,
    and cos and sin; and the attention of layers that see all of a tile, if there are any."""

    hidden: Tensor
    qkv: Tensor
    angles: Mapping[Value, tuple[Tensor, Tensor]]
    mixer: BothWays | None

    @classmethod
    def of(cls, tower: Decoder, units: Units, places: Sequence[Tensors]) -> TileLayout:
        """Returns the layout of a tower, of whose first unit these are the values."""
        at = {value: tensor for each in places for value, tensor in each.items()}
        angles = {op.out: angles_of(at[op.out]) for op in units.angles}
        return cls(at[units.hidden], at[units.qkv], angles, _whole_mixer(tower))

    def allocate(self, plan: TilePlan) -> NativeTile:
        """Returns memory for a tile, whose rows are as far apart as a part's."""

        def rows_as(local: Tensor) -> Tensor:
            whole = torch.empty(plan.num_tokens, local.stride(0), dtype=local.dtype)
            return whole[:, : local.shape[1]]

        angles = {value: (rows_as(cos), rows_as(sin)) for value, (cos, sin) in self.angles.items()}
        packed: tuple[PackedCells, ...] = ()
        if self.mixer is not None:
            dtype = self.qkv.dtype
            shape = BothWaysShape(self.mixer.head_dim, dtype.itemsize, plan.num_tokens)
            packed = tuple(
                PackedCells.allocate(self.mixer.num_heads, shape, dtype) for _ in range(2)
            )
        return NativeTile(plan, rows_as(self.hidden), rows_as(self.qkv), angles, packed)

    def kept(self, *, has_angles: bool) -> Iterator[tuple[Tensor, Callable[[NativeTile], Tensor]]]:
        """Yields the values that a unit goes on with as the one before has left them, and the rows
        that a tile has for them."""
        yield self.hidden, lambda tile: tile.hidden
        for value in self.angles if has_angles else ():
            cos, sin = self.angles[value]
            yield cos, _wave(value, 0)
            yield sin, _wave(value, 1)


def _wave(value: Value, index: int) -> Callable[[NativeTile], Tensor]:
    return lambda tile: tile.angles[value][index]


def _whole_mixer(tower: Decoder) -> BothWays | None:
    """Returns the attention of layers that see all of a tile, which all have one shape."""
    return next((each for each in attention_of(tower) if not each.in_windows), None)


def tile_bytes(tower: Decoder, dtype: torch.dtype, num_tokens: int) -> int:
    """Returns the memory of a tile of so many tokens."""
    qkv = max(each.qkv.out_features for each in attention_of(tower))
    angles = sum(rope.rotary_size(head_dim) for rope, head_dim in tower.ropes)
    of_token = tower.hidden_size + row_stride(qkv, dtype.itemsize) + angles
    num_elements, mixer = num_tokens * of_token, _whole_mixer(tower)
    if mixer is not None:
        shape = BothWaysShape(mixer.head_dim, dtype.itemsize, num_tokens)
        num_elements += 2 * PackedCells.size_of(mixer.num_heads, shape)
    return num_elements * dtype.itemsize
