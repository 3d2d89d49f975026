"""The gated delta rule (Qwen 3.5), after a convolution and before a gated norm: its description,
its operations, and their place in the walk."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.model.description import Cut, Norm, Projection, Recurrence
from inference_svc.model.operations import (
    Listing,
    Numbers,
    Op,
    Project,
    Run,
    Value,
    WeightSpec,
    conv_kernels,
    numbers_of,
)
from kernels.recurrence import DeltaHeads


@dataclass(frozen=True, slots=True)
class GatedDelta(Recurrence):
    """The gated delta rule (Yang, Kautz and Hatamizadeh, 2024), as `kernels.recurrence` defines it.

    `into` makes q, k and v of all heads, which a causal convolution of `kernel_size` mixes; then
    the gate z of the output, and b and a of each value head. `conv`, `decay` and `decay_bias` are
    tensors: the convolution's weights, and numbers for each value head. `norm` is of each head's
    output, times silu(z). If it `is_by_key_head`, `into` makes q, k, v and z of one key head after
    the other, and then b and a of one after the other.
    """

    into: Projection
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    conv: str
    decay: str
    decay_bias: str
    norm: Norm
    is_by_key_head: bool = False

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """The channels of q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def conv_cuts(self) -> tuple[Cut, ...]:
        """The channels of q, k and v that this rank has; none: all."""
        values = self.out.in_cut
        if values is None:
            return ()
        of_key_head = self.value_size // self.num_key_heads
        keys = Cut(*(each // of_key_head * self.key_head_dim for each in values))
        return keys, keys, values

    @property
    def head_cuts(self) -> tuple[Cut, ...]:
        """The value heads that this rank has; none: all."""
        values = self.out.in_cut
        return () if values is None else (Cut(*(each // self.value_head_dim for each in values)),)

    @property
    def heads(self) -> DeltaHeads:
        return DeltaHeads(
            self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim
        )

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The sizes of the parts that `into` makes: q, k and v, z, b, and a."""
        return self.conv_size, self.value_size, self.num_value_heads, self.num_value_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (
            (self.kernel_size - 1, self.conv_size),
            (self.num_value_heads, self.key_head_dim, self.value_head_dim),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Convolve(Op):
    """Mixes the first channels of its input with the same channels of the tokens before, and
    applies silu. It continues from each sequence's state."""

    mixer: GatedDelta
    kernels: Numbers = field(init=False)

    def __post_init__(self) -> None:
        mixer = self.mixer
        sizes = mixer.conv_size, mixer.kernel_size
        kernels = conv_kernels(mixer.conv, *sizes, self.layer, mixer.conv_cuts)
        object.__setattr__(self, "kernels", kernels)

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.kernels,)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule(Op):
    """The gated delta rule of each sequence's state and tokens. `inputs` are q, k and v as they are
    convolved, and the projection that has b and a."""

    mixer: GatedDelta
    decay: Numbers = field(init=False)
    decay_bias: Numbers = field(init=False)

    def __post_init__(self) -> None:
        mixer, count = self.mixer, self.mixer.num_value_heads
        for name, tensor in (("decay", mixer.decay), ("decay_bias", mixer.decay_bias)):
            numbers = numbers_of(tensor, count, self.layer, cuts=mixer.head_cuts)
            object.__setattr__(self, name, numbers)

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.decay, self.decay_bias)


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm(Op):
    """Norms each head, in place, and multiplies it by silu of its gate. `inputs` are the heads, and
    the projection that has the gates."""

    mixer: GatedDelta

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.mixer.norm,)


def list_operations(walk: Listing, layer: int, mixer: GatedDelta, x: Value) -> Value:
    """Lists the operations up to the last projection; see `walk.MIXERS`."""
    made = walk.value("delta_in", mixer.into.out_features)
    walk.ops.append(Project((x,), made, layer, mixer.into))
    if mixer.is_by_key_head:
        made = walk.regroup(layer, made, "delta_parts", _part_by_part(mixer))
    convolved = walk.value("delta_qkv", mixer.conv_size)
    walk.ops.append(Convolve((made,), convolved, layer, mixer))
    mixed = walk.value("delta_out", mixer.value_size)
    walk.ops.append(DeltaRule((convolved, made), mixed, layer, mixer))
    walk.ops.append(GatedNorm((mixed, made), mixed, layer, mixer))
    return mixed


def _part_by_part(mixer: GatedDelta) -> tuple[Run, ...]:
    """Returns the runs of columns that two projections have key head by key head: q, k, v and z of
    the first, b and a of the second."""
    per_head = mixer.num_value_heads // mixer.num_key_heads
    values = per_head * mixer.value_head_dim
    runs: list[Run] = []
    source = target = 0
    for sizes in ((mixer.key_head_dim,) * 2 + (values,) * 2, (per_head,) * 2):
        for index, size in enumerate(sizes):
            for head in range(mixer.num_key_heads):
                at = source + head * sum(sizes) + sum(sizes[:index])
                runs.append(Run(at, target, size))
                target += size
        source += mixer.num_key_heads * sum(sizes)
    return tuple(runs)
