"""The inversion of a cumulative distribution against sums in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.sampling.reference import invert


@pytest.mark.parametrize("width", [1, 255, 256, 257, 1000])
def test_inversion_finds_the_first_index_above(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    probs = torch.rand(50, width, generator=generator) ** 8
    probs[:, 1::3] = 0.0
    probs[:20, width // 2 + 1 :] = 0.0
    probs /= probs.sum(-1, keepdim=True)
    numbers = torch.rand(50, 1, dtype=torch.float64, generator=generator)
    numbers[:10], numbers[10:20] = 0.0, 1 - 2**-53
    found = invert(probs, numbers)
    cumulative = np.cumsum(probs.double().numpy(), axis=1)
    for row, index in enumerate(found.tolist()):
        number = numbers[row].item() * cumulative[row, -1]
        assert probs[row, index] > 0
        assert cumulative[row, index] >= number * (1 - 1e-12)
        assert index == 0 or cumulative[row, index - 1] <= number * (1 + 1e-12)
