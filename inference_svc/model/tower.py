"""Vision towers: make the embeddings of a picture's tokens, some units at a time."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.core import BASE_SLOT
from inference_svc.host.copies import to_device
from inference_svc.model.checkpoint.weights import ModelWeights, P
from inference_svc.model.description import BothWays, Decoder, Pictures
from inference_svc.model.encoder.operations import AttendBothWays
from inference_svc.model.encoder.tiles import TilePart, TilePlan
from inference_svc.model.encoder.towers import outputs_of
from inference_svc.model.inputs import Blend, StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import RotaryEmbedding, TorchLinear
from inference_svc.model.lifetimes import last_uses
from inference_svc.model.lora import Lora
from inference_svc.model.operations import AddNorm, Angles, Op, Value
from inference_svc.model.step import Step
from inference_svc.model.transformer import COMPUTE
from inference_svc.model.walk import operations
from inference_svc.pictures.processor import CHANNELS, Processor
from inference_svc.pictures.sizes import MAX_SLICE, Size
from inference_svc.pictures.units import Share
from kernels.attention import AttentionPlan, both_ways
from kernels.pictures.reference import cut_patches

WARM_CELLS = 10
"""The cells of each side of a tile that is computed to compile kernels."""
_CPU = torch.device("cpu")


@dataclass(slots=True)
class TileState:
    """A tile that is being computed."""

    plan: TilePlan


@dataclass(slots=True)
class TorchTile(TileState):
    """The stream [tokens, size], and queries, keys and values [tokens, 3 * size] of the last two
    layers, of which each reads the one before. `angles` are of all tokens."""

    hidden: Tensor
    qkv: tuple[Tensor, Tensor]
    angles: dict[Value, Any] = field(default_factory=dict)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Encoding:
    """A picture that is being computed, tile by tile: `rows` are its embeddings [tokens,
    hidden_size], of which the ones of the tiles before `index` are there. Of this one `num_units`
    are computed, as `state` has them."""

    tile: Size
    num_tiles: int
    rows: Tensor
    index: int = 0
    num_units: int = 0
    state: TileState | None = None

    @property
    def is_done(self) -> bool:
        return self.index == self.num_tiles

    def begin_again(self) -> None:
        """Counts as computed no longer what was."""
        self.index = 0
        self.begin_tile_again()

    def begin_tile_again(self) -> None:
        """Counts as computed no longer what was of the tile, and frees its state."""
        self.num_units, self.state = 0, None


class Tower(ABC, Generic[P]):
    """Computes tiles one by one. The unit of its work is a layer of a strip of a tile: from the
    attention of a layer up to the one of the next, before the first layer or behind the last; or,
    of a large tile, a share of this attention, or what follows its shares. Units that follow each
    other are computed at once, as whole strips or as shares of one. It has the state of one tile at
    a time: if another one begins, the first begins again. `device` has the weights and all else."""

    def __init__(
        self,
        pictures: Pictures,
        weights: ModelWeights[P],
        units: Units,
        device: torch.device = _CPU,
    ) -> None:
        self._pictures = pictures
        self._tower = pictures.tower
        self._device = device
        self.weights = weights
        self._units = units
        is_host = device.type == _CPU.type
        self.order = pictures.units(torch.get_num_threads() if is_host else None)
        """The units of tiles, which the ones who plan its work count, too."""
        self.most_tokens = MAX_SLICE
        """The most tokens of strips that are computed at once. Memory is counted for MAX_SLICE."""
        self._plans: dict[Size, TilePlan] = {}
        self._last: weakref.ref[Encoding] | None = None

    @property
    def workspace_bytes(self) -> int:
        """The memory that it holds between its works to compute parts of tiles in."""
        return 0

    def begin(self, tile: Size, num_tiles: int) -> Encoding:
        """Returns a picture of so many tiles of this size, of which nothing is computed."""
        num_rows = num_tiles * self._pictures.tiles.tokens(tile)
        shape = num_rows, self._pictures.row_size
        rows = torch.empty(shape, dtype=self.weights.dtype, device=self._device)
        return Encoding(tile, num_tiles, rows)

    @torch.inference_mode()
    def go_on(
        self, encoding: Encoding, pixels: bytes | memoryview, num_units: int, slot: int
    ) -> None:
        """Computes so many more units of a picture's tiles, or as many as are left. `pixels` are
        uint8 [tiles, height, width, 3], which only requests keep: they are many times as large as
        the embeddings. At `slot` is the adapter that changes them now; -1: none. If it fails, none
        is computed: a unit may have changed some of its own inputs."""
        try:
            self._compute_units(encoding, pixels, num_units, slot)
        except BaseException:
            encoding.begin_again()
            raise

    def _compute_units(
        self, encoding: Encoding, pixels: bytes | memoryview, num_units: int, slot: int
    ) -> None:
        while num_units and not encoding.is_done:
            state = encoding.state
            if state is None:
                self._end_other(encoding)
                state = encoding.state = self._begin_tile(self._plan(encoding.tile))
            count = self._go_on(encoding, state, pixels, num_units, slot)
            num_units -= count
            encoding.num_units += count
            if encoding.num_units == self.order.count(encoding.tile):
                encoding.index, encoding.num_units, encoding.state = encoding.index + 1, 0, None
                self._end_tile(state)

    def _end_other(self, encoding: Encoding) -> None:
        """Frees the state of the tile that was begun last, if it is another picture's: the memory
        for states is of one."""
        last = None if self._last is None else self._last()
        if last is not None and last is not encoding:
            last.begin_tile_again()
        self._last = weakref.ref(encoding)

    def _go_on(
        self,
        encoding: Encoding,
        state: TileState,
        pixels: bytes | memoryview,
        num_units: int,
        slot: int,
    ) -> int:
        """Computes up to so many units of a tile: whole strips, some shares of the attention of
        one, or its products. Returns how many."""
        tile, unit = encoding.tile, self.order.find(encoding.tile, encoding.num_units)
        is_whole = not unit.place and num_units >= unit.num_units
        num_strips = num_units // unit.num_units if is_whole else 1
        part = state.plan.part(unit.strip, num_strips, self.most_tokens)
        mixer = self._units.mixer(unit.layer)
        if is_whole:
            if mixer is not None and not mixer.in_windows:
                whole = Share(0, part.num_tokens, 0, mixer.num_heads)
                self._attend(state, unit.layer, part, whole)
        elif unit.num_shares:
            share, count = self.order.joined(tile, unit.place, min(num_units, unit.num_shares))
            own = share.within(part.num_tokens)
            if own.first < own.end:
                self._attend(state, unit.layer, part, own)
            return count
        inputs = self._pixels(encoding, pixels)
        for out, rows in self._compute(state, unit.layer, part, inputs, slot):
            self._place(encoding, part, out, rows)
        return part.num_strips * unit.num_units if is_whole else 1

    def _plan(self, tile: Size) -> TilePlan:
        plan = self._plans.get(tile)
        if plan is None:
            patches, inputs = self._tower.patches, self._tower.encoder
            assert patches is not None
            plan = TilePlan.of(patches, tile, None if inputs is None else inputs.positions)
            plan = plan.on(self._device)
            self._plans = {tile: plan}  # pictures of one size follow each other, as in a video
        return plan

    def _pixels(self, encoding: Encoding, pixels: bytes | memoryview) -> NDArray[np.uint8]:
        """Returns the tile that is being computed, uint8 [height, width, 3]."""
        shape = (*encoding.tile, CHANNELS)
        count = encoding.tile.height * encoding.tile.width * CHANNELS
        return np.frombuffer(pixels, np.uint8, count, encoding.index * count).reshape(shape)

    def _place(self, encoding: Encoding, part: TilePart, out: Value, rows: Tensor) -> None:
        """Puts the outputs of the connector, or of a tap, to their places."""
        count, size = self._pictures.tiles.tokens(encoding.tile), self._pictures.size
        own = encoding.rows[encoding.index * count :]
        place = self._units.outs.index(out) * size
        own[part.cells, place : place + size] = rows

    @abstractmethod
    def _begin_tile(self, plan: TilePlan) -> TileState: ...

    @abstractmethod
    def _attend(self, state: Any, layer: int, part: TilePart, share: Share) -> None:
        """Computes a share of a part's attention in a layer that sees all of a tile. The outputs
        take the place of the queries."""

    @abstractmethod
    def _compute(
        self, state: Any, layer: int, part: TilePart, pixels: NDArray[np.uint8], slot: int
    ) -> Sequence[tuple[Value, Tensor]]:
        """Computes a layer of each strip of a part, of a tile with these pixels, except attention
        that `_attend` has computed. Returns the outputs [cells, size] that it makes."""

    def _end_tile(self, state: Any) -> None:
        """A tile has been computed."""


class TorchTower(Tower[TorchLinear]):
    """A tower in torch, on a CPU or another device. `lora_at` returns the adapter at a slot, and
    `warm_up` computes with each of `any_loras`, which change nothing."""

    def __init__(
        self,
        pictures: Pictures,
        weights: ModelWeights[TorchLinear],
        lora_at: Callable[[int], Lora | None],
        device: torch.device = _CPU,
        any_loras: Sequence[Lora | None] = (),
    ) -> None:
        found = operations(pictures.tower)
        units = Units.of(pictures.tower, (*found.layers, *found.head))
        super().__init__(pictures, weights, units, device)
        self._lora_at = lora_at
        self._lora: Lora | None = None
        self._planned: TilePlan | None = None
        self._attention: dict[tuple[int, int], AttentionPlan] = {}
        self._any_loras = any_loras
        self._values = byte_values(pictures.processor).to(device)
        self._rotary = {key: RotaryEmbedding(*key, device) for key in self._tower.ropes}
        self._no_caches = KVCaches.allocate(
            self._tower,
            num_pages=1,
            page_size=1,
            dtype=torch.float32,
            stored=torch.float32,
            device=device,
        )

    def go_on(
        self, encoding: Encoding, pixels: bytes | memoryview, num_units: int, slot: int
    ) -> None:
        self._lora = self._lora_at(slot)  # of all units of this step
        super().go_on(encoding, pixels, num_units, slot)

    def warm_up(self) -> None:
        """Computes black tiles, so that kernels are compiled."""
        form = self._pictures.tiles
        side = WARM_CELLS * form.cell_size
        tile = form.whole if form.tile_size else Size(side, side)
        black = bytes(tile.height * tile.width * CHANNELS)
        for lora in self._any_loras:
            self._lora = lora
            super().go_on(self.begin(tile, 1), black, self.order.count(tile), BASE_SLOT)

    def _begin_tile(self, plan: TilePlan) -> TorchTile:
        units, dtype = self._units, self.weights.dtype
        hidden, first, second = (
            torch.empty(plan.num_tokens, width, dtype=dtype, device=self._device)
            for width in (units.hidden.width, units.qkv.width, units.qkv.width)
        )
        angles = {
            op.out: self._rotary[op.rope, op.head_dim](plan.positions, dtype) for op in units.angles
        }
        return TorchTile(plan, hidden, (first, second), angles)

    def _attend(self, state: TorchTile, layer: int, part: TilePart, share: Share) -> None:
        mixer = self._units.mixer(layer)
        assert mixer is not None
        qkv = state.qkv[(layer - 1) % 2].unflatten(1, (3, mixer.num_heads, mixer.head_dim))
        q, k, v = qkv[:, :, share.first_head : share.end_head].unbind(1)
        own = q[part.start + share.first : part.start + share.end]
        own.copy_(both_ways.attend_all(own, k, v, mixer.scale))

    def _compute(
        self, state: TorchTile, layer: int, part: TilePart, pixels: NDArray[np.uint8], slot: int
    ) -> Sequence[tuple[Value, Tensor]]:
        units, own = self._units, slice(part.start, part.end)
        step = self._step(state.plan, part, None if layer else pixels)
        for angles, made in state.angles.items():
            step.values[angles] = type(made)(*(each[own] for each in made))
        if layer:
            step.values[units.hidden] = state.hidden[own]
            step.values[units.qkv] = state.qkv[(layer - 1) % 2]
        for op, ended in units.ops[layer]:
            if isinstance(op, AttendBothWays) and not op.mixer.in_windows:
                # Kernels of adapters read rows without gaps.
                step.values[op.out] = step.values[units.qkv][own, : op.mixer.size].contiguous()
            elif not isinstance(op, Angles):
                step.values[op.out] = COMPUTE[type(op)](op, step)
            for value in ended:
                del step.values[value]
        if layer + 1 < len(units.ops):
            state.hidden[own] = step.values[units.hidden]
            state.qkv[layer % 2][own] = step.values[units.qkv]
        return [(out, step.values[out]) for out in units.outs if out in step.values]

    def _step(self, plan: TilePlan, part: TilePart, pixels: NDArray[np.uint8] | None) -> Step:
        own = slice(part.start, part.end)
        rows = torch.arange(part.first_row, part.num_tokens, device=self._device)
        positions = plan.positions[..., own]
        patches = None if pixels is None else self._patches(plan, part, pixels)
        return Step(
            weights=self.weights,
            rotary=self._rotary,
            inputs=StepInputs(
                token_ids=positions,
                positions=positions,
                logit_rows=rows,
                attention=self._windows(plan, part),
                patches=patches,
                part=own,
                blend=None if plan.blend is None else Blend(*(each[own] for each in plan.blend)),
            ),
            kv_caches=self._no_caches,
            lora=self._lora,
            columns={},
            rows=rows,
            choices={},
            token_order=None,
        )

    def _windows(self, plan: TilePlan, part: TilePart) -> AttentionPlan:
        """Returns the windows of a part as rows of a step, of which only the host's part is read.
        They are the same in each layer."""
        if plan is not self._planned:
            self._planned, self._attention = plan, {}
        key = part.start, part.end
        if key not in self._attention:
            starts = part.window_starts
            counts = np.diff(starts) if len(starts) > 1 else np.array([part.num_tokens])
            zeros, pages = np.zeros(len(counts), np.int64), [[0]] * len(counts)
            made = AttentionPlan.build(zeros, counts, pages, int(counts.max()), _CPU)
            self._attention[key] = made
        return self._attention[key]

    def _patches(self, plan: TilePlan, part: TilePart, pixels: NDArray[np.uint8]) -> Tensor:
        """Returns the part's patches, fp32 [P, 3, side, side]. Of the tile's pixels only the rows
        around them are copied: a tile may have hundreds of parts."""
        added, side = plan.form.num_added, plan.form.patch_size
        own = slice(max(part.start - added, 0), part.end - added)
        rows, columns = plan.patches[:, own]
        first, last = (int(edge(plan.host_rows[own])) for edge in (np.min, np.max))
        around = to_device(pixels[first * side : (last + 1) * side].copy(), self._device)
        return cut_patches(around, self._values, rows - first, columns, side)


def byte_values(processor: Processor) -> Tensor:
    """Returns the number that a processor makes of each byte of each channel, fp32 [3, 256]."""
    every = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 1, CHANNELS)
    return normalised(every, processor).view(256, CHANNELS).t().contiguous()


def normalised(pixels: Tensor, processor: Processor) -> Tensor:
    """Returns fp32 [N, 3, height, width], as a processor makes them of uint8 [N, height, width,
    3]."""
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (processor.mean, processor.std))
    scaled = (pixels.permute(0, 3, 1, 2).double() * processor.scale).float()
    return (scaled - mean) / std


@dataclass(frozen=True, slots=True)
class Units:
    """The operations of units, with the values to let go of: the ones before the first attention,
    from each attention to the next, and from the last to the connector's end. `hidden` and `qkv`
    are what a unit leaves for the next, and `outs` the outputs of the connector and of taps.
    `angles` are of the first unit."""

    ops: list[list[tuple[Op, tuple[Value, ...]]]]
    hidden: Value
    qkv: Value
    outs: tuple[Value, ...]
    angles: list[Angles]

    def mixer(self, index: int) -> BothWays | None:
        """Returns the attention that a unit begins with; none before the first layer, and behind
        the last."""
        first = self.ops[index][0][0] if index < len(self.ops) else None
        return first.mixer if isinstance(first, AttendBothWays) else None

    @classmethod
    def of(cls, tower: Decoder, ops: Sequence[Op]) -> Units:
        """Returns the units of a tower's operations."""
        outs = outputs_of(tower, ops)
        angles = [op for op in ops if isinstance(op, Angles)]
        units: list[list[tuple[Op, tuple[Value, ...]]]] = [[]]
        for op, ended in zip(ops, last_uses(ops, (*outs, *(op.out for op in angles))), strict=True):
            if isinstance(op, AttendBothWays):
                units.append([])
            units[-1].append((op, ended))
        qkv = next(op.inputs[0] for op in ops if isinstance(op, AttendBothWays))
        hidden = next(op.hidden for op in ops if isinstance(op, AddNorm))
        return cls(units, hidden, qkv, outs, angles)
