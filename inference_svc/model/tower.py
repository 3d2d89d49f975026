"""A vision tower in torch: makes the embeddings of a picture's tokens, some layers at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Decoder, Pictures
from inference_svc.model.encoder.operations import AttendBothWays
from inference_svc.model.encoder.tiles import TilePart, TilePlan
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
from inference_svc.pictures.sizes import Size


@dataclass(slots=True)
class TileState:
    """A tile that is being computed: the stream [tokens, size], and queries, keys and values
    [tokens, 3 * size] of the last two layers, of which each reads the one before. `angles` are of
    all tokens."""

    plan: TilePlan
    hidden: Tensor
    qkv: tuple[Tensor, ...]
    angles: dict[Value, object] = field(default_factory=dict)


@dataclass(slots=True)
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


class TorchTower:
    """Computes tiles one by one. The unit of its work is a layer of a part of a tile: from the
    attention of a layer up to the one of the next, before the first layer or behind the last."""

    def __init__(self, pictures: Pictures, weights: ModelWeights[TorchLinear]) -> None:
        self._pictures = pictures
        self._tower = tower = pictures.tower
        self.weights = weights
        self._layers = _TowerOps.of(tower)
        device = torch.device("cpu")
        self._rotary = {key: RotaryEmbedding(*key, device) for key in tower.ropes}
        self._plans: dict[Size, TilePlan] = {}
        self._no_caches = KVCaches.allocate(
            tower,
            num_pages=1,
            page_size=1,
            dtype=torch.float32,
            stored=torch.float32,
            device=device,
        )

    def begin(self, tile: Size, num_tiles: int) -> Encoding:
        """Returns a picture of so many tiles of this size, of which nothing is computed."""
        num_rows = num_tiles * self._pictures.tiles.tokens(tile)
        size = self._pictures.row_size
        return Encoding(tile, num_tiles, torch.empty(num_rows, size, dtype=self.weights.dtype))

    @torch.inference_mode()
    def go_on(
        self,
        encoding: Encoding,
        pixels: bytes | memoryview,
        num_units: int,
        lora: Lora | None = None,
    ) -> None:
        """Computes so many more units of a picture's tiles, or as many as are left. `pixels` are
        uint8 [tiles, height, width, 3], which only requests keep: they are many times as large as
        the embeddings. `lora` is the adapter that changes them, where it lies now."""
        for _ in range(num_units):
            if encoding.is_done:
                return
            if encoding.state is None:
                encoding.state = self._begin_tile(encoding.tile)
            self._compute(encoding, encoding.state, pixels, lora)
            encoding.num_units += 1
            if encoding.num_units == len(encoding.state.plan.parts) * len(self._layers.layers):
                encoding.index, encoding.num_units, encoding.state = encoding.index + 1, 0, None

    def _begin_tile(self, tile: Size) -> TileState:
        plan = self._plans.get(tile)
        if plan is None:
            patches = self._tower.patches
            assert patches is not None
            inputs = self._tower.encoder
            plan = TilePlan.of(patches, tile, None if inputs is None else inputs.positions)
            self._plans = {tile: plan}  # pictures of one size follow each other, as in a video
        layers, count = self._layers, plan.num_tokens
        hidden = torch.empty(count, layers.hidden.width, dtype=self.weights.dtype)
        num_copies = min(2, len(plan.parts))
        qkv = tuple(
            torch.empty(count, layers.qkv.width, dtype=self.weights.dtype)
            for _ in range(num_copies)
        )
        state = TileState(plan, hidden, qkv)
        step = self._step(plan, plan.parts[0], plan.positions)
        state.angles |= {op.out: COMPUTE[Angles](op, step) for op in layers.angles}
        return state

    def _compute(
        self,
        encoding: Encoding,
        state: TileState,
        pixels: bytes | memoryview,
        lora: Lora | None,
    ) -> None:
        """Computes the next unit of a tile."""
        plan, layers = state.plan, self._layers
        layer, index = divmod(encoding.num_units, len(plan.parts))
        part = plan.parts[index]
        own = slice(part.start, part.end)
        positions = plan.positions[..., own]
        patches = None if layer else self._patches(encoding, state, pixels, part)
        step = self._step(plan, part, positions, patches, lora)
        step.values |= state.angles
        if layer:
            step.values[layers.hidden] = state.hidden[own]
            step.values[layers.qkv] = state.qkv[(layer - 1) % len(state.qkv)]
        for op, ended in layers.layers[layer]:
            step.values[op.out] = COMPUTE[type(op)](op, step)
            for value in ended:
                del step.values[value]
        if layer + 1 < len(layers.layers):
            state.hidden[own] = step.values[layers.hidden]
            state.qkv[layer % len(state.qkv)][own] = step.values[layers.qkv]
        count, size = self._pictures.tiles.tokens(encoding.tile), self._pictures.size
        rows = encoding.rows[encoding.index * count :]
        for place, out in enumerate(layers.outs):
            if out in step.values:
                rows[part.cells, place * size : (place + 1) * size] = step.values[out]

    def _patches(
        self, encoding: Encoding, state: TileState, pixels: bytes | memoryview, part: TilePart
    ) -> Tensor:
        """Returns the patches of a part, fp32 [patches, 3, side, side]."""
        form, (height, width) = self._pictures.tiles, encoding.tile
        first = encoding.index * CHANNELS * height * width
        tile = np.frombuffer(pixels, np.uint8, CHANNELS * height * width, first)
        (rows, columns), side = form.grid(encoding.tile), form.patch_size
        tile = tile.reshape(height, width, CHANNELS)[: rows * side, : columns * side]
        cut = tile.reshape(rows, side, columns, side, CHANNELS)
        start = max(0, part.start - form.num_added)
        own = state.plan.patches[:, start : part.end - form.num_added].numpy()
        return normalised(torch.from_numpy(cut[own[0], :, own[1]]), self._pictures.processor)

    def _step(
        self,
        plan: TilePlan,
        part: TilePart,
        positions: Tensor,
        patches: Tensor | None = None,
        lora: Lora | None = None,
    ) -> Step:
        own = slice(part.start, part.end)
        blend = None if plan.blend is None else Blend(*(each[own] for each in plan.blend))
        return Step(
            weights=self.weights,
            rotary=self._rotary,
            inputs=StepInputs(
                token_ids=positions,
                positions=positions,
                logit_rows=part.rows,
                attention=part.windows,
                patches=patches,
                part=own,
                blend=blend,
            ),
            kv_caches=self._no_caches,
            lora=lora,
            columns={},
            rows=part.rows,
            choices={},
            token_order=None,
        )


def normalised(pixels: Tensor, processor: Processor) -> Tensor:
    """Returns fp32 [N, 3, height, width], as a processor makes them of uint8 [N, height, width,
    3]."""
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (processor.mean, processor.std))
    scaled = (pixels.permute(0, 3, 1, 2).double() * processor.scale).float()
    return (scaled - mean) / std


@dataclass(frozen=True, slots=True)
class _TowerOps:
    """The operations of units, with the values to let go of: the ones before the first attention,
    from each attention to the next, and from the last to the connector's end. `hidden` and `qkv`
    are what a unit leaves for the next, and `outs` the outputs of the connector and of taps.
    `angles` are computed once a tile."""

    layers: list[list[tuple[Op, tuple[Value, ...]]]]
    hidden: Value
    qkv: Value
    outs: tuple[Value, ...]
    angles: list[Angles]

    @classmethod
    def of(cls, tower: Decoder) -> _TowerOps:
        found = operations(tower)
        ops = (*found.layers, *found.head)
        names = [tap.connector.layers[-1].name for tap in tower.taps]
        made = {op.out.name: op.out for op in ops}
        outs = (ops[-1].out, *(made[name] for name in names))
        layers: list[list[tuple[Op, tuple[Value, ...]]]] = [[]]
        for op, ended in zip(ops, last_uses(ops, outs), strict=True):
            if isinstance(op, Angles):
                continue
            if isinstance(op, AttendBothWays):
                layers.append([])
            layers[-1].append((op, ended))
        qkv = next(op.inputs[0] for op in ops if isinstance(op, AttendBothWays))
        angles = [op for op in ops if isinstance(op, Angles)]
        hidden = next(op.hidden for op in ops if isinstance(op, AddNorm))
        return cls(layers, hidden, qkv, outs, angles)
