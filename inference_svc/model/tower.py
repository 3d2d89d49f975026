"""A vision tower in torch: makes the embeddings of a picture's tokens, some layers at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Decoder, Patches, Pictures
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchLinear
from inference_svc.model.lifetimes import last_uses
from inference_svc.model.operations import Op, Value
from inference_svc.model.step import Step
from inference_svc.model.transformer import COMPUTE
from inference_svc.model.walk import operations
from inference_svc.pictures.processor import CHANNELS, Processor
from kernels.attention import AttentionPlan


@dataclass(slots=True)
class Encoding:
    """A picture that is being computed, tile by tile: `rows` are its embeddings [tokens,
    hidden_size], of which the ones of the tiles before `tile` are there. Of this one `num_layers`
    are computed, as `step` has them."""

    num_tiles: int
    rows: Tensor
    tile: int = 0
    num_layers: int = 0
    step: Step | None = None

    @property
    def is_done(self) -> bool:
        return self.tile == self.num_tiles


class TorchTower:
    """Computes tiles one by one: one layer of one tile is the unit of its work."""

    def __init__(self, pictures: Pictures, weights: ModelWeights[TorchLinear]) -> None:
        self._pictures = pictures
        self._tower = tower = pictures.tower
        self.weights = weights
        self._parts = _parts_of(tower)
        self._plan, self._positions, self._rows = _plan_of(tower)
        self._no_caches = KVCaches.allocate(
            tower,
            num_pages=1,
            page_size=1,
            dtype=torch.float32,
            stored=torch.float32,
            device=torch.device("cpu"),
        )

    def begin(self, num_tiles: int) -> Encoding:
        """Returns a picture of so many tiles, of which nothing is computed."""
        num_rows = num_tiles * self._pictures.tokens_per_tile
        assert self._tower.connector is not None
        size = self._tower.connector.layers[-1].out_features
        dtype = next(iter(self.weights.tables.values())).dtype
        return Encoding(num_tiles, torch.empty(num_rows, size, dtype=dtype))

    @torch.inference_mode()
    def go_on(self, encoding: Encoding, pixels: bytes, num_units: int) -> None:
        """Computes so many more layers of a picture's tiles, or as many as are left. `pixels` are
        uint8 [tiles, side, side, 3], which only requests keep: they are many times as large as
        the embeddings."""
        for _ in range(num_units):
            if encoding.is_done:
                return
            if encoding.step is None:
                encoding.step = self._begin_tile(pixels, encoding.tile)
            values = encoding.step.values
            for op, ended in self._parts[encoding.num_layers]:
                values[op.out] = COMPUTE[type(op)](op, encoding.step)
                for value in ended:
                    del values[value]
            encoding.num_layers += 1
            if encoding.num_layers == len(self._parts):
                last = self._parts[-1][-1][0].out
                count = self._pictures.tokens_per_tile
                encoding.rows[encoding.tile * count :][:count] = values[last]
                encoding.tile, encoding.num_layers, encoding.step = encoding.tile + 1, 0, None

    def _begin_tile(self, pixels: bytes, index: int) -> Step:
        side, size = self._pictures.processor.tile_size, self._pictures.processor.tile_bytes
        own = bytearray(memoryview(pixels)[index * size :][:size])
        tile = torch.frombuffer(own, dtype=torch.uint8).view(1, side, side, CHANNELS)
        return Step(
            weights=self.weights,
            rotary={},
            inputs=StepInputs(
                token_ids=self._positions,
                positions=self._positions,
                logit_rows=self._rows,
                attention=self._plan,
                pixels=normalised(tile, self._pictures.processor),
            ),
            kv_caches=self._no_caches,
            lora=None,
            columns={},
            rows=self._rows,
            choices={},
            token_order=None,
        )


def normalised(tiles: Tensor, processor: Processor) -> Tensor:
    """Returns fp32 [tiles, 3, side, side], as a processor makes them of uint8 [tiles, side, side,
    3]."""
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (processor.mean, processor.std))
    scaled = (tiles.permute(0, 3, 1, 2).double() * processor.scale).float()
    return (scaled - mean) / std


def _parts_of(tower: Decoder) -> list[list[tuple[Op, tuple[Value, ...]]]]:
    """Returns the operations of each layer, with the values to let go of; the first layer's begin
    with the inputs, and the last layer's end with the connector."""
    found = operations(tower)
    ops = (*found.layers, *found.head)
    parts: list[list[tuple[Op, tuple[Value, ...]]]] = [[] for _ in tower.layers]
    layer = 0
    for op, ended in zip(ops, last_uses(ops, [ops[-1].out]), strict=True):
        layer = layer if op.layer is None else op.layer
        parts[layer].append((op, ended))
    return parts


def _plan_of(tower: Decoder) -> tuple[AttentionPlan, Tensor, Tensor]:
    """Returns the plan of attention within a tile, the positions of its tokens, and the tokens
    that the connector reads."""
    assert tower.patches is not None
    count = tower.patches.num_tokens
    zero, counts = np.zeros(1, np.int64), np.array([count])
    plan = AttentionPlan.build(zero, counts, [[0]], count, "cpu")
    positions = _by_fractions(tower.patches) if tower.patches.has_fractions else torch.arange(count)
    return plan, positions, torch.arange(tower.patches.num_dropped, count)


def _by_fractions(patches: Patches) -> Tensor:
    """Returns the positions of a tile's patches, int64 [patches], as transformers has them: where
    the patch's place in fp32 lies among the borders. For some numbers of patches, such as 19 each
    side, rounding moves patches to their neighbour's position, and the model was trained so."""
    count = patches.tile_size // patches.patch_size
    borders = torch.arange(1 / count, 1.0, 1 / count)
    step = 1.0 / torch.tensor(count)
    places = (torch.arange(count, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
    found = torch.bucketize(places, borders, right=True)
    return (found[:, None] * count + found).flatten()
