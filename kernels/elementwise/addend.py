"""Adapters' addition to a projection's outputs, kept apart for the kernel that reads both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Addend(NamedTuple):
    """`values` [T, outputs] are still to be added to a projection's outputs, in their dtype;
    contiguous. `slots`, int32 [T], has the slot of each token: below 0 the token has no adapter,
    and its values are undefined."""

    values: Tensor
    slots: Tensor

    def added_to(self, out: Tensor) -> Tensor:
        """Returns the sum, rounded to the outputs' dtype: [T, outputs] -> [T, outputs]."""
        return torch.where((self.slots >= 0)[:, None], out + self.values, out)

    def of_rows(self, rows: Tensor) -> Addend:
        """Returns these tokens' part, int64 [N]."""
        return Addend(self.values.index_select(0, rows), self.slots.index_select(0, rows))
