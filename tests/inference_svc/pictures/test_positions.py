"""Positions of pictures are those of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from inference_svc.pictures.positions import NUM_AXES, PicturePositions
from inference_svc.pictures.prompt import PromptPicture, Run
from inference_svc.pictures.sizes import Size
from tests.support.pictures.models import FREE, PATCH, make_reader, tile_form

GRIDS = ((4, 6), (10, 2), (2, 2), (6, 6))
"""Rows and columns of patches."""
NUM_WORDS = (3, 1, 5, 2, 7)
"""Tokens of text before each picture, and behind the last."""
CUTS = ([], [1], [3, 4, 9, 10], range(0, 39, 7), range(39))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_reader(FREE[0], tmp_path_factory.mktemp("reader"))


def prompt() -> tuple[torch.Tensor, tuple[PromptPicture, ...]]:
    """Returns which tokens are of pictures, int64 [T], and the pictures."""
    kinds: list[int] = []
    pictures = []
    for (rows, columns), words in zip((*GRIDS, (0, 0)), NUM_WORDS, strict=True):
        kinds += [0] * words
        count, tile = rows * columns // 4, Size(PATCH * rows, PATCH * columns)
        if count:
            run = Run(len(kinds), len(kinds) + count)
            pictures.append(PromptPicture(b"", b"", tile, 1, (run,)))
        kinds += [1] * count
    return torch.tensor(kinds), tuple(pictures)


@pytest.mark.parametrize("cuts", CUTS)
def test_positions_equal_transformers(cuts: Iterable[int], model: Any) -> None:
    """However a prompt is cut; and a row of text behind it is left as it is."""
    kinds, pictures = prompt()
    grids = torch.tensor([(1, *grid) for grid in GRIDS])
    expected, _ = model.model.get_rope_index(kinds[None], kinds[None], image_grid_thw=grids)
    expected = expected[:, 0]
    places = PicturePositions(tile_form(FREE[0]))
    borders = sorted({0, *cuts, len(kinds)})
    for start, end in pairwise(borders):
        positions = np.concatenate((np.arange(start, end), [77, 78]))
        out = np.empty((NUM_AXES, len(positions)), np.int64)
        places.fill(out, positions, [(pictures, end - start), ((), 2)])
        assert out[:, :-2].tolist() == expected[:, start:end].tolist(), (start, end)
        assert out[:, -2:].tolist() == [[77, 78]] * NUM_AXES
