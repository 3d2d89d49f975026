"""A vision tower in C++: a unit of its work is one program, over fixed buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.native.ops import NativeOps
from inference_svc.backends.native.projections import PackedProjection
from inference_svc.backends.native.towers.lora import TowerLoraOps
from inference_svc.backends.native.towers.memory import PartArrays
from inference_svc.backends.native.towers.operations import TowerOps
from inference_svc.backends.native.towers.tiles import NativeTile, TileLayout
from inference_svc.backends.native.towers.units import UnitPrograms
from inference_svc.backends.native.workspace import Workspace
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Pictures
from inference_svc.model.encoder.tiles import TilePart, TilePlan
from inference_svc.model.operations import Value
from inference_svc.model.tower import Tower, Units
from inference_svc.model.walk import Narrowing, operations
from inference_svc.pictures.units import Share
from kernels.native.library import Library


class NativeTower(Tower[PackedProjection]):
    """A tower of tiles of up to `longest` tokens. Its programs compute a part in a workspace of
    their own: each begins by loading what the unit before has left of the tile, and ends by storing
    what the next ones need."""

    def __init__(
        self,
        pictures: Pictures,
        weights: ModelWeights[PackedProjection],
        arena: Arena,
        targets: AppliedTargets,
        library: Library,
        longest: int,
    ) -> None:
        tower, form = pictures.tower, pictures.tiles
        found = operations(tower, Narrowing.BEFORE_HEAD)
        super().__init__(pictures, weights, Units.of(tower, (*found.layers, *found.head)))
        most = form.max_part(longest)
        self._library = library
        self._workspace = Workspace.allocate(tower, most, most, weights.dtype)
        self._part = PartArrays(most)
        self._lora = TowerLoraOps(arena, targets, most, form.merge)
        self._ops = TowerOps(pictures, weights, self._part)
        make = NativeOps(
            weights,
            self._part,
            self._workspace.logits,
            self._workspace.int8_inputs,
            self._lora,
            self._ops,
        ).make
        tensors = iter(self._workspace.tensors(found, is_apart=True))
        places = [[next(tensors) for _ in ops] for ops in self._units.ops]
        self._tiles = TileLayout.of(tower, self._units, places[0])
        self._programs = [
            UnitPrograms(self._tiles, index, self._units, places[index], make, self._ops)
            for index in range(len(self._units.ops))
        ]
        self._spare: NativeTile | None = None

    @property
    def workspace_bytes(self) -> int:
        of_parts = self._workspace.num_bytes + self._part.num_bytes
        return of_parts + self._ops.num_bytes + self._lora.workspace_bytes

    def _begin_tile(self, plan: TilePlan) -> NativeTile:
        spare, self._spare = self._spare, None
        if spare is None:
            return self._tiles.allocate(plan)
        spare.plan = plan
        return spare

    def _end_tile(self, state: NativeTile) -> None:
        if self._pictures.tiles.tile_size:  # all tiles are as large
            self._spare = state

    def _attend(self, state: NativeTile, layer: int, part: TilePart, share: Share) -> None:
        self._part.tile[1][1] = state.plan.num_tokens
        self._programs[layer].attend(self._library, state, part, share)

    def _compute(
        self, state: NativeTile, layer: int, part: TilePart, pixels: NDArray[np.uint8], slot: int
    ) -> Sequence[tuple[Value, Tensor]]:
        counts = self._part.fill(state.plan, part)
        groups = self._lora.plan_part(slot, counts)
        if not layer:
            self._ops.read_pixels(pixels)
        unit = self._programs[layer]
        unit.point(state, part)
        unit.program(self._library, groups).run()
        return [(out, rows[: len(part.cells)]) for out, rows in unit.outs]
