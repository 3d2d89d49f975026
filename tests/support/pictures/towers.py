"""Towers of both backends of CPUs, of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from inference_svc.adapters.targets import applied_to_pictures, build_layout
from inference_svc.backends.arena import Arena
from inference_svc.backends.native.projections import PackedProjections
from inference_svc.backends.native.towers.tower import NativeTower
from inference_svc.backends.pictures import IN_TORCH
from inference_svc.core import BASE_SLOT
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.weights import load_weights
from inference_svc.model.tower import Encoding, Tower
from kernels.native.library import load
from tests.support.gpu.models import Placing, entries_of

BACKENDS = ("torch", "native")
LONGEST = 4096
"""The most patches of a tile of any size, whatever the processor makes of a picture."""


def tower_of(
    folder: Path,
    backend: str,
    dtype: torch.dtype = torch.float32,
    longest: int = LONGEST,
    *,
    has_adapter: bool = False,
) -> Tower[Any]:
    """Returns the tower of a model's folder, whose tiles of any size have at most `longest`
    patches. With an adapter, the one at slot 0 changes every other target."""
    decoder = load_description(folder, with_pictures=True)
    pictures = decoder.pictures
    assert pictures is not None
    layout = build_layout(decoder, "model", dtype)
    arena = Arena(layout, 1 << 18, 1, 8, torch.device("cpu"), num_mixes=1)
    if has_adapter:
        generator = torch.Generator().manual_seed(0)
        arena.flat.copy_(0.1 * torch.randn(arena.flat.shape, generator=generator))
        arena.table.set_row(0, entries_of(layout, 0, Placing(arena)))
    targets = applied_to_pictures(layout)
    if backend == "torch":
        projections, make = IN_TORCH
        weights = load_weights(folder, pictures.tower, dtype, "cpu", projections())
        return make(pictures, weights, arena, targets)
    packed = load_weights(folder, pictures.tower, dtype, "cpu", PackedProjections())
    library = load()
    assert library is not None
    form = pictures.tiles
    longest = form.inner_tokens(form.whole) if form.tile_size else longest
    return NativeTower(pictures, packed, arena, targets, library, longest)


def compute(
    tower: Tower[Any], encoding: Encoding, pixels: bytes, num_units: int, slot: int = BASE_SLOT
) -> int:
    """Computes a picture, so many units at a time. Returns how many times that were."""
    num_turns = 0
    while not encoding.is_done:
        tower.go_on(encoding, pixels, num_units, slot)
        num_turns += 1
    return num_turns
