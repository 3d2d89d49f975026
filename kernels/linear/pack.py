"""Weights in the order in which `src/linear.cpp` reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.host_memory import allocate_host
from kernels.quantised import QuantisedRows

PANEL = 32
"""Outputs that lie together; as in `src/linear.h`."""
BLOCK = 32 * PANEL
"""Rows that are converted at once where they have another dtype: their copy is all that packing
takes beside the packed."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedLinear:
    """One projection. Nothing of the tensors that its rows are packed from is kept.

    weights: [panels, in, PANEL] of float32, or [panels, ceil(in / 2), 2 * PANEL] of bfloat16, two
    neighbouring inputs of one output side by side; zero beyond the last input and output.
    bias: float32 [out_features].
    """

    weights: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int

    @staticmethod
    def empty(
        out_features: int,
        in_features: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        allocate: Callable[[int], Tensor] = allocate_host,
    ) -> PackedLinear:
        """Returns a projection of float32 or bfloat16, [out_features, in_features], whose rows are
        zero until they are put. `allocate` gives zeroed bytes, uint8, on 64 bytes."""
        assert dtype in (torch.float32, torch.bfloat16)
        num_panels = -(-out_features // PANEL)
        num_steps = -(-in_features * dtype.itemsize // 4)
        packed = allocate(num_panels * num_steps * PANEL * 4).view(dtype)
        return PackedLinear(
            packed.view(num_panels, num_steps, PANEL * 4 // dtype.itemsize),
            torch.zeros(out_features) if has_bias else None,
            in_features,
            out_features,
        )

    @staticmethod
    def pack(
        weight: Tensor,
        bias: Tensor | None = None,
        allocate: Callable[[int], Tensor] = allocate_host,
    ) -> PackedLinear:
        """weight: [out, in] of float32 or bfloat16, on the CPU; bias: [out]. See `empty`."""
        packed = PackedLinear.empty(
            *weight.shape, has_bias=bias is not None, dtype=weight.dtype, allocate=allocate
        )
        packed.put_rows(0, weight)
        if bias is not None:
            packed.put_bias(0, bias)
        return packed

    def put_rows(self, start: int, rows: Tensor | QuantisedRows) -> None:
        """Packs plain rows [N, in] of any float dtype, on the CPU, as those from `start` on."""
        assert isinstance(rows, Tensor)
        step_dtype = torch.int32 if self.dtype == torch.bfloat16 else self.dtype
        panels = self.weights.view(step_dtype)  # [panels, steps, PANEL]
        while len(rows):
            panel, lane = divmod(start, PANEL)
            if lane or len(rows) < PANEL:
                steps = self._steps(rows[: PANEL - lane])
                panels[panel, :, lane : lane + len(steps)] = steps.t()
            else:
                num_panels = min(len(rows), BLOCK) // PANEL
                steps = self._steps(rows[: num_panels * PANEL])
                whole = steps.unflatten(0, (num_panels, PANEL)).transpose(1, 2)
                panels[panel : panel + num_panels] = whole
            start, rows = start + len(steps), rows[len(steps) :]

    def _steps(self, rows: Tensor) -> Tensor:
        """Returns rows as what is read at once, [N, in] of float32 or [N, ceil(in / 2)] of int32,
        without a copy where they have the dtype."""
        rows = rows.to(self.dtype)
        if self.dtype != torch.bfloat16:
            return rows
        # Padding copies even where there is nothing to pad.
        pairs = F.pad(rows, (0, 1)) if self.in_features % 2 else rows.contiguous()
        return pairs.view(torch.int32)

    def put_bias(self, start: int, values: Tensor) -> None:
        """Takes values [N], rounded to the weights' dtype, as those from `start` on."""
        assert self.bias is not None
        self.bias[start : start + len(values)] = values.to(self.dtype)

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows [start, end) of the weight as they were put, [end - start, in], a copy."""
        step_dtype = torch.int32 if self.dtype == torch.bfloat16 else self.dtype
        if start == end:
            return torch.empty(0, self.in_features, dtype=self.dtype)
        first = start // PANEL
        panels = self.weights.view(step_dtype)[first : -(-end // PANEL)]
        rows = panels.transpose(1, 2).flatten(0, 1)[start - first * PANEL : end - first * PANEL]
        return rows.contiguous().view(self.dtype)[:, : self.in_features]

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + (0 if self.bias is None else self.bias.nbytes)
