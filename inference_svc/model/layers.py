"""The decoder's parts that hold something: weights of projections, frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.rope import Rope
from kernels.attention import rotary_angles


@dataclass(frozen=True, slots=True)
class Linear:
    """Computes x @ weight.T + bias: weight [out, in], bias [out], both in the model's dtype."""

    weight: Tensor
    bias: Tensor | None = None

    @staticmethod
    def empty(
        out_features: int,
        in_features: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Linear:
        """Returns a projection whose rows are undefined until they are put."""
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        return Linear(weight, weight.new_empty(out_features) if has_bias else None)

    @staticmethod
    def of(weight: Tensor) -> Linear:
        """Returns a projection without a bias that shares `weight` [out, in]."""
        return Linear(weight)

    def put_rows(self, start: int, rows: Tensor) -> None:
        """Copies rows [N, in], of any float dtype, to the weight's rows from `start` on."""
        self.weight[start : start + len(rows)].copy_(rows)

    def put_bias(self, start: int, values: Tensor) -> None:
        """Copies values [N], of any float dtype, to the bias's values from `start` on."""
        assert self.bias is not None
        self.bias[start : start + len(values)].copy_(values)

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows [start, end) of the weight, a view [end - start, in]."""
        return self.weight[start:end]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias)

    def in_fp32(self, x: Tensor) -> Tensor:
        """x: [T, in] -> fp32 [T, out], sums that are not rounded."""
        if x.device.type == "cpu" or x.dtype == torch.float32:
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias)
        out = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return out if self.bias is None else out.add_(self.bias)

    def of_experts(self, num_experts: int, out_features: int) -> tuple[Tensor, Tensor | None]:
        """Returns views of the weights of experts that lie below each other, [experts, out, in],
        and of their biases, [experts, out]."""
        weight = self.weight.unflatten(0, (num_experts, -1))[:, :out_features]
        if self.bias is None:
            return weight, None
        return weight, self.bias.unflatten(0, (num_experts, -1))[:, :out_features]


class Rotation(NamedTuple):
    """One step's angles [T, 1, rotary size]; see `kernels.attention.reference.rotary_angles`. None:
    nothing is rotated."""

    cos: Tensor | None
    sin: Tensor | None


class RotaryEmbedding:
    """Computes angles from positions, once per step instead of storing them for every position of
    a long context; each depends on its own position alone."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self.inverse_frequencies = rope.inverse_frequencies(head_dim).to(device)
        self._scaling = rope.attention_scaling

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T]."""
        return Rotation(*rotary_angles(positions, self.inverse_frequencies, self._scaling, dtype))
