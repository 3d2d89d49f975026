"""The gated short convolution (LFM 2): its description, its operation, its place in the walk."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.model.description import Projection, Recurrence
from inference_svc.model.operations import (
    Listing,
    Numbers,
    Op,
    Project,
    Value,
    WeightSpec,
    conv_kernels,
)


@dataclass(frozen=True, slots=True)
class ShortConv(Recurrence):
    """A causal convolution of `kernel_size` between two gates, as `kernels.recurrence` defines it.

    `into` makes the gate of the input, the gate of the output, and the input, each of the hidden
    size. `conv` is the tensor of the convolution's weights.
    """

    into: Projection
    kernel_size: int
    conv: str

    @property
    def num_channels(self) -> int:
        return self.into.out_features // 3

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.kernel_size - 1, self.num_channels),)


@dataclass(frozen=True, slots=True, eq=False)
class GatedConvolve(Op):
    """Gates its input, mixes it with inputs of the tokens before, and gates the output. It
    continues from each sequence's state."""

    mixer: ShortConv
    kernels: Numbers = field(init=False)

    def __post_init__(self) -> None:
        mixer = self.mixer
        cut = mixer.out.in_cut
        cuts = () if cut is None else (cut,)
        sizes = mixer.num_channels, mixer.kernel_size
        kernels = conv_kernels(mixer.conv, *sizes, self.layer, cuts)
        object.__setattr__(self, "kernels", kernels)

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.kernels,)


def list_operations(walk: Listing, layer: int, mixer: ShortConv, x: Value) -> Value:
    """Lists the operations up to the last projection; see `walk.MIXERS`."""
    made = walk.value("conv_in", mixer.into.out_features)
    walk.ops.append(Project((x,), made, layer, mixer.into))
    mixed = walk.value("conv_out", mixer.num_channels)
    walk.ops.append(GatedConvolve((made,), mixed, layer, mixer))
    return mixed
