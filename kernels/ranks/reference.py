"""The definition of a sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_ranks(terms: Sequence[Tensor]) -> Tensor:
    """Returns the sum of one term of each rank, which is computed in fp32, in the order of ranks,
    and rounded once.

    Args:
        terms: Tensors of one shape and dtype.

    Returns:
        A tensor of this shape and dtype.
    """
    total = terms[0].to(torch.float32, copy=True)
    for each in terms[1:]:
        total += each.float()
    return total.to(terms[0].dtype)
