"""Attention without a causal mask equals softmax over the tokens of a row, written out."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import both_ways
from kernels.attention.plan import AttentionPlan

LENGTHS = {
    "one": [1],
    "equal": [7, 7, 7],
    "mixed": [1, 1, 30, 30, 2, 30, 65],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reach", [None, 0, 3, 29, 1000])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attend(lengths: list[int], reach: int | None, dtype: torch.dtype) -> None:
    num_tokens, heads, size = sum(lengths), 3, 10
    torch.manual_seed(0)
    qkv = torch.randn(num_tokens, 3, heads, size).to(dtype)
    q, k, v = qkv.unbind(1)
    plan = AttentionPlan.build([0] * len(lengths), lengths, [range(9)] * len(lengths), 8)
    found = both_ways.attend(q, k, v, plan, 0.3, reach)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        own_q, own_k, own_v = (each[rows].float().transpose(0, 1) for each in (q, k, v))
        scores = 0.3 * own_q @ own_k.transpose(1, 2)
        if reach is not None:
            places = torch.arange(length)
            scores[:, (places[:, None] - places).abs() > reach] = float("-inf")
        wanted = (scores.softmax(-1) @ own_v).transpose(0, 1)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found[rows].float(), wanted, atol=tolerance, rtol=tolerance)
        start += length
    assert found.dtype == dtype
