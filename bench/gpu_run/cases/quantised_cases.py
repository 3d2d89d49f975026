"""A layer's products with weights in few bits, next to the same in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_run.cases.lora_cases import groups, random
from bench.gpu_run.context import Context
from kernels import quantised
from kernels.quantised import Activations, Codes, QuantisedWeight, WeightFormat, reference

FORMATS = {
    "W4A16, groups of 128": WeightFormat(Codes.INT4, 128, scales="bfloat16"),
    "W4A16, groups of 128, offsets": WeightFormat(
        Codes.UINT4, 128, has_offsets=True, scales="float16"
    ),
    "NF4, groups of 64": WeightFormat(Codes.NF4, 64),
    "MXFP4": WeightFormat(Codes.FP4, 32, scales="bfloat16"),
    "W8A16": WeightFormat(Codes.INT8),
    "FP8, weights only": WeightFormat(Codes.FP8),
    "W8A8": WeightFormat(Codes.INT8, activations=Activations.INT8),
}
FIRST = next(iter(FORMATS))
LARGEST_SCALE = 0.01


class Projection(NamedTuple):
    """The sizes of a layer's product."""

    name: str
    num_in: int
    num_out: int


def projections(context: Context) -> list[Projection]:
    """Returns a layer's products; the head's is in the model's dtype."""
    return [Projection(each.name, each.num_in, sum(each.widths)) for each in groups(context)[:-1]]


@dataclass(frozen=True)
class Products:
    """Products of rows with as many copies of a weight as no cache holds."""

    context: Context
    form: WeightFormat
    projection: Projection
    num_rows: int

    @cached_property
    def x(self) -> Tensor:
        return random(self.context, self.num_rows, self.projection.num_in)

    def num_copies(self, num_bytes: int) -> int:
        sizes = self.context.sizes
        return max(1, min(sizes.max_calls, sizes.case_bytes // num_bytes))

    @property
    def num_bytes(self) -> int:
        """The bytes that a product reads of its weight."""
        return self.form.num_bytes(self.projection.num_out, self.projection.num_in)

    @cached_property
    def weights(self) -> list[QuantisedWeight]:
        copies = range(self.num_copies(self.num_bytes))
        return [random_weight(self.context, self.form, self.projection, seed) for seed in copies]

    def run(self) -> None:
        for weight in self.weights:
            quantised.linear(self.x, weight)

    def result(self) -> Tensor:
        return quantised.linear(self.x, self.weights[0])

    def wanted(self) -> Tensor:
        rows = self.weights[0].rows(0, self.projection.num_out)
        return reference.linear(self.x, rows)

    def plain(self) -> tuple[Callable[[], None], int]:
        """Returns the same products with weights of the model's dtype, and how many there are."""
        shape = (self.projection.num_out, self.projection.num_in)
        one = random(self.context, *shape)
        weights = [one.clone() for _ in range(self.num_copies(one.nbytes))]

        def run() -> None:
            for weight in weights:
                F.linear(self.x, weight)

        return run, len(weights)


def random_weight(
    context: Context, form: WeightFormat, projection: Projection, seed: int
) -> QuantisedWeight:
    """Returns a weight of random codes, without FP8's that are no numbers, and positive scales."""
    device = context.device
    weight = QuantisedWeight.empty(form, projection.num_out, projection.num_in, device)
    generator = torch.Generator(device).manual_seed(seed)
    weight.codes.random_(0, 256, generator=generator)
    if form.codes is Codes.FP8:
        weight.codes.bitwise_and_(0xBF)
    for numbers in (weight.scales, weight.offsets):
        if numbers is not None:
            numbers.uniform_(0, LARGEST_SCALE, generator=generator)
    return weight
