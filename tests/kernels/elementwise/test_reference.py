"""The definitions of norms agree with each other."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise.reference import norm_by_sum, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [(48,), (5, 48)], ids=["one", "each_token"])
def test_a_norm_of_parts(dtype: torch.dtype, weights: tuple[int, ...]) -> None:
    """By the sum of the squares of both parts, it is the norm of the whole."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 48).to(dtype), torch.rand(weights)
    sums = x.float().square().sum(dim=1)
    parts = zip(x.split(16, dim=1), weight.split(16, dim=-1), strict=True)
    found = [norm_by_sum(part, own, 1e-3, sums, 48) for part, own in parts]
    torch.testing.assert_close(torch.cat(found, dim=1), rms_norm(x, weight, 1e-3))
