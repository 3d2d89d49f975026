"""The definition of a base projection: plain torch, fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """out[t] = x[t] @ weight^T + bias, summed in fp32 and rounded once.

    Args:
        x: [T, in].
        weight: [out, in].
        bias: [out]. None: none.
        dtype: The dtype of the result. None: x's.

    Returns:
        [T, out].
    """
    sums = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return sums.to(dtype or x.dtype)
