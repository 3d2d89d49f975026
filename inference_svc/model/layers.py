"""The decoder's parts that hold something: weights of projections, frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.description import Activation, WeightPart
from inference_svc.model.quantised.scheme import Rows
from inference_svc.model.rope import Rope
from kernels import quantised
from kernels.attention import rotary_angles
from kernels.experts import Pairs, experts_linear
from kernels.quantised import QuantisedWeight


class TorchLinear(Protocol):
    """A projection in torch: x @ weight.T + bias."""

    @property
    def bias(self) -> Tensor | None:
        """[out], in the model's dtype."""

    @property
    def out_features(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def put_rows(self, start: int, rows: Rows) -> None:
        """Takes rows [N, in], plain ones of any float dtype, as the rows from `start` on."""

    def put_bias(self, start: int, values: Tensor) -> None:
        """Copies values [N], of any float dtype, to the bias's values from `start` on."""

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows [start, end) of the weight, [end - start, in] in the model's dtype, which
        may be a view."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out], both in the model's dtype."""

    def in_fp32(self, x: Tensor) -> Tensor:
        """x: [T, in] -> fp32 [T, out], sums that are not rounded."""

    def of_experts(self, x: Tensor, pairs: Pairs, num_experts: int, out_features: int) -> Tensor:
        """Multiplies each pair's row of x [P, in] by the weight of its expert, of `num_experts`
        that lie below each other: [P, out_features] of x's dtype."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A `TorchLinear` of a plain weight [out, in] and a bias [out], both in the model's dtype."""

    weight: Tensor
    bias: Tensor | None = None

    def put_rows(self, start: int, rows: Rows) -> None:
        assert isinstance(rows, Tensor)
        self.weight[start : start + len(rows)].copy_(rows)

    def put_bias(self, start: int, values: Tensor) -> None:
        assert self.bias is not None
        self.bias[start : start + len(values)].copy_(values)

    def rows(self, start: int, end: int) -> Tensor:
        return self.weight[start:end]

    @property
    def out_features(self) -> int:
        return len(self.weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def in_fp32(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" or x.dtype == torch.float32:
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias)
        out = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return out if self.bias is None else out.add_(self.bias)

    def of_experts(self, x: Tensor, pairs: Pairs, num_experts: int, out_features: int) -> Tensor:
        weight = self.weight.unflatten(0, (num_experts, -1))[:, :out_features]
        bias = _bias_of_experts(self.bias, num_experts, out_features)
        return experts_linear(x, weight, pairs, bias)


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """A `TorchLinear` of a weight in few bits; its bias [out] is in the model's dtype."""

    weight: QuantisedWeight
    bias: Tensor | None = None

    def put_rows(self, start: int, rows: Rows) -> None:
        self.weight.put_rows(start, rows)

    def put_bias(self, start: int, values: Tensor) -> None:
        assert self.bias is not None
        self.bias[start : start + len(values)].copy_(values)

    def rows(self, start: int, end: int) -> Tensor:
        return self.weight.rows(start, end).dequantise()

    @property
    def out_features(self) -> int:
        return len(self.weight.codes)

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return quantised.linear(x, self.weight, self.bias)

    def in_fp32(self, x: Tensor) -> Tensor:
        return quantised.linear(x, self.weight, self.bias, torch.float32)

    def of_experts(self, x: Tensor, pairs: Pairs, num_experts: int, out_features: int) -> Tensor:
        bias = _bias_of_experts(self.bias, num_experts, out_features)
        step = self.out_features // num_experts
        return quantised.experts_linear(x, self.weight, pairs, bias, step, out_features)


@dataclass(frozen=True, slots=True)
class PartsLinear:
    """A `TorchLinear` of several, whose outputs lie side by side: its rows have several formats.
    `bias` [out] has the biases of all, which are views of it."""

    parts: tuple[Linear | QuantisedLinear, ...]
    bias: Tensor | None = None

    def put_rows(self, start: int, rows: Rows) -> None:
        part, first = part_of(self.parts, start)
        part.put_rows(start - first, rows)

    def put_bias(self, start: int, values: Tensor) -> None:
        assert self.bias is not None
        self.bias[start : start + len(values)].copy_(values)

    def rows(self, start: int, end: int) -> Tensor:
        return rows_of(self.parts, start, end)

    @property
    def out_features(self) -> int:
        return sum(each.out_features for each in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in self.parts], dim=1)

    def in_fp32(self, x: Tensor) -> Tensor:
        return torch.cat([each.in_fp32(x) for each in self.parts], dim=1)

    def of_experts(self, x: Tensor, pairs: Pairs, num_experts: int, out_features: int) -> Tensor:
        raise AssertionError("weights of experts have one format")


class HasRows(Protocol):
    """A part of a projection: some of its rows, in one format."""

    @property
    def out_features(self) -> int: ...

    def rows(self, start: int, end: int) -> Tensor: ...


AnyPart = TypeVar("AnyPart", bound=HasRows)


def part_of(parts: Sequence[AnyPart], row: int) -> tuple[AnyPart, int]:
    """Returns the part of a projection that has a row, and the part's first row."""
    first = 0
    for part in parts:
        if row < first + part.out_features:
            break
        first += part.out_features
    return part, first


def rows_of(parts: Sequence[HasRows], start: int, end: int) -> Tensor:
    """Returns rows [start, end) of a projection's weight, [end - start, in], from all its parts;
    fp32 if these give several dtypes."""
    found, first = [], 0
    for part in parts:
        own = max(start - first, 0), min(end - first, part.out_features)
        if own[0] < own[1]:
            found.append(part.rows(*own))
        first += part.out_features
    return found[0] if len(found) == 1 else torch.cat(found)


class TorchProjections:
    """Makes projections in torch."""

    @staticmethod
    def empty(
        parts: Sequence[WeightPart],
        in_features: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TorchLinear:
        """Returns a projection whose rows are undefined until they are put."""
        sizes = [each.num_rows for each in parts]
        bias = torch.empty(sum(sizes), dtype=dtype, device=device) if has_bias else None

        def made(part: WeightPart, own: Tensor | None) -> Linear | QuantisedLinear:
            if part.format is None:
                weight = torch.empty(part.num_rows, in_features, dtype=dtype, device=device)
                return Linear(weight, own)
            few_bits = QuantisedWeight.empty(part.format, part.num_rows, in_features, device)
            return QuantisedLinear(few_bits, own)

        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        every = tuple(map(made, parts, biases))
        return every[0] if len(every) == 1 else PartsLinear(every, bias)

    @staticmethod
    def of(weight: Tensor) -> Linear:
        """Returns a projection without a bias that shares `weight` [out, in]."""
        return Linear(weight)


def _bias_of_experts(bias: Tensor | None, num_experts: int, out_features: int) -> Tensor | None:
    """Returns a view of biases that lie below each other, [experts, out]."""
    return None if bias is None else bias.unflatten(0, (num_experts, -1))[:, :out_features]


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
        self._axes = None if rope.axes is None else rope.axes.of_pairs.to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T], or [axes, T]."""
        if self._axes is not None:
            positions = positions[self._axes].t()
        return Rotation(*rotary_angles(positions, self.inverse_frequencies, self._scaling, dtype))


QUICK_GELU_FACTOR = 1.702


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Returns an activation of x, of any shape and float dtype."""
    if activation is Activation.SILU:
        return F.silu(x)
    if activation is Activation.QUICK_GELU:
        return x * torch.sigmoid(QUICK_GELU_FACTOR * x)
    return F.gelu(x, approximate="tanh" if activation is Activation.GELU_TANH else "none")
