"""The operations of vision towers and connectors, as data, and where a decoder reads their
outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from inference_svc.model.description import (
    BothWays,
    Connector,
    Decoder,
    Merging,
    Patches,
    Standard,
)
from inference_svc.model.encoder.operations import Activate
from inference_svc.model.operations import (
    Listing,
    NormOf,
    Numbers,
    Op,
    Project,
    Rows,
    Value,
    WeightSpec,
)
from inference_svc.pictures.processor import CHANNELS


@dataclass(frozen=True, slots=True, eq=False)
class EmbedPatches(Op):
    """Makes the tower's tokens of the step's patches, after a tile's class token, if it has one."""

    patches: Patches
    weight: Numbers = field(init=False)
    bias: Numbers | None = field(init=False)
    class_token: Numbers | None = field(init=False)

    def __post_init__(self) -> None:
        patches, width = self.patches, self.out.width
        side, frames = patches.form.patch_size, patches.form.frames
        shape: tuple[int, ...] = (width, CHANNELS, side, side)
        if frames > 1:
            shape = (width, CHANNELS, frames, side, side)
        size = math.prod(shape)
        name = patches.module
        bias = Numbers(f"{name}.bias", width) if patches.has_bias else None
        token = Numbers(patches.class_token, width) if patches.class_token else None
        object.__setattr__(self, "weight", Numbers(f"{name}.weight", size, shape))
        object.__setattr__(self, "bias", bias)
        object.__setattr__(self, "class_token", token)

    def kernel(self, numbers: Tensor) -> Tensor:
        """Returns the weight of the product that makes tokens of patches, fp32 [width, CHANNELS *
        side * side]. The convolution is one, because patches do not overlap; of frames that are
        equal it has the sum of their kernels."""
        kernel = numbers.view(self.weight.shape)
        return (kernel.sum(2) if self.patches.form.frames > 1 else kernel).flatten(1)

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return self.weight, self.bias, self.class_token


@dataclass(frozen=True, slots=True, eq=False)
class ReadPatches(Op):
    """The step's patches, pixel by pixel."""

    patches: Patches


@dataclass(frozen=True, slots=True, eq=False)
class MergePatches(Op):
    """Makes one row of the `count` patches of each cell, which follow each other."""

    count: int
    merging: Merging


@dataclass(frozen=True, slots=True, eq=False)
class Standardise(Op):
    """Applies a `Standard`, in place."""

    standard: Standard
    bias: Numbers | None = field(init=False)
    factor: Numbers | None = field(init=False)

    def __post_init__(self) -> None:
        for name in ("bias", "factor"):
            tensor = getattr(self.standard, name)
            object.__setattr__(self, name, Numbers(tensor, self.out.width) if tensor else None)

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return self.bias, self.factor


@dataclass(frozen=True, slots=True, eq=False)
class PlacePictures(Op):
    """Puts the embeddings of pictures in the place of their tokens' own."""


@dataclass(frozen=True, slots=True, eq=False)
class AddPictures(Op):
    """Adds the embeddings of a tower's tap to the stream of pictures' tokens."""

    tap: int


def list_patches(walk: Listing, hidden: Value, patches: Patches) -> None:
    """Lists the operations that take the place of a lookup of tokens."""
    if patches.layer is None:
        walk.ops.append(EmbedPatches((), hidden, None, patches))
        return
    read = walk.value("patches", patches.layer.in_features)
    walk.ops.append(ReadPatches((), read, None, patches))
    walk.ops.append(Project((read,), hidden, None, patches.layer))


def has_taps(decoder: Decoder, layer: int) -> bool:
    """Returns whether a tower has taps behind a layer, or a layer takes in the ones of a tower."""
    num_taken = 0 if decoder.pictures is None else len(decoder.pictures.tower.taps)
    return layer < num_taken or any(tap.layer == layer for tap in decoder.taps)


def list_taps(walk: Listing, hidden: Value, decoder: Decoder, layer: int) -> None:
    """Lists the operations from what a layer leaves to further embeddings, or the one that takes
    them in."""
    if decoder.patches is None:
        walk.ops.append(AddPictures((hidden,), hidden, None, layer))
    for tap in decoder.taps:
        if tap.layer == layer:
            merged = _list_merge(walk, hidden, decoder)
            normed = walk.value("merged_normed", merged.width, merged.rows)
            walk.ops.append(NormOf((merged,), normed, None, tap.norm))
            _list_connector(walk, normed, tap.connector)


def attention_of(tower: Decoder) -> tuple[BothWays, ...]:
    """Returns the attention of each layer of a tower."""
    mixers = (block.mixer for block in tower.blocks)
    return tuple(each for each in mixers if isinstance(each, BothWays))


def outputs_of(tower: Decoder, ops: Sequence[Op]) -> tuple[Value, ...]:
    """Returns the outputs of a tower's connector, and then of its taps."""
    names = [tap.connector.layers[-1].name for tap in tower.taps]
    made = {op.out.name: op.out for op in ops}
    return (ops[-1].out, *(made[name] for name in names))


def list_outputs(walk: Listing, x: Value, decoder: Decoder) -> Value:
    """Lists the operations from a tower's outputs to embeddings, which it returns."""
    connector = decoder.connector
    assert connector is not None
    x = _list_merge(walk, x, decoder)
    if connector.standard is not None:
        walk.ops.append(Standardise((x,), x, None, connector.standard))
    if connector.norm is not None:
        walk.ops.append(NormOf((x,), x, None, connector.norm))
    return _list_connector(walk, x, connector)


def _list_merge(walk: Listing, x: Value, decoder: Decoder) -> Value:
    """Lists the operation that joins the patches of each cell, if they are several."""
    assert decoder.patches is not None
    assert decoder.connector is not None
    count, merging = decoder.patches.form.merge**2, decoder.connector.merging
    if count == 1:
        return x
    merged = walk.value("merged", x.width * (1 if merging is Merging.MEAN else count), Rows.CELLS)
    walk.ops.append(MergePatches((x,), merged, None, count, merging))
    return merged


def _list_connector(walk: Listing, x: Value, connector: Connector) -> Value:
    for index, projection in enumerate(connector.layers):
        if 0 < index == len(connector.layers) - 1 and connector.activation is not None:
            active = walk.value(f"active_{index}", x.width, x.rows)
            walk.ops.append(Activate((x,), active, None, connector.activation))
            x = active
        made = walk.value(projection.name, projection.out_features, x.rows)
        walk.ops.append(Project((x,), made, None, projection))
        x = made
    return x
