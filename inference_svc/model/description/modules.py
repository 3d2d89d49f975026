"""Norms and linear layers: the parts of a decoder that have weights of their own."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from kernels.experts import padded_rows
from kernels.quantised import WeightFormat

EMBED_TOKENS, LM_HEAD, LAYER_INPUTS = "model.embed_tokens", "lm_head", "layer_inputs"
SCORE = "score"
"""A classifier's head."""
"""Modules, and the name of the projection of `LayerInputs`."""


def layer_path(layer: int, module: str) -> str:
    """Returns the path of a layer's module, such as "model.layers.3.self_attn.q_proj"."""
    return f"model.layers.{layer}.{module}"


class Cut(NamedTuple):
    """Features [start, end) among all `whole`: the features that one rank has."""

    start: int
    end: int
    whole: int

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def range(self) -> tuple[int, int]:
        return self.start, self.end

    def times(self, width: int) -> Cut:
        """Returns the elements of these features, each of which has so many."""
        return Cut(self.start * width, self.end * width, self.whole * width)


class NormKind(enum.Enum):
    """RMS: x / sqrt(mean(x^2) + eps). LAYER: the same of x - mean(x)."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over `size` elements, times its weight plus `weight_offset`; without a `module` the
    weight is 1.

    Where it `is_wide` the weight is in fp32, and the product is rounded; else the norm is rounded
    to the model's dtype before the product. `tensor` is the name of its weight in the checkpoint
    where that is not "weight" of the module; then adapters do not have it. The weight is multiplied
    by `weight_scale`. `cut` is the range of elements that this rank has, of a norm over the
    elements of all ranks; None: all. If it `has_bias`, the tensor "bias" of the module is added to
    the product, in fp32.
    """

    module: str
    size: int
    eps: float
    kind: NormKind = NormKind.RMS
    weight_offset: float = 0.0
    is_wide: bool = False
    tensor: str = ""
    weight_scale: float = 1.0
    cut: Cut | None = None
    has_bias: bool = False

    def __post_init__(self) -> None:
        assert self.is_wide or not self.has_bias

    def path(self, layer: int | None) -> str:
        """Returns the path of its module, of a layer or, None, of the whole."""
        return self.module if layer is None else layer_path(layer, self.module)


class Member(NamedTuple):
    """A linear layer and its number of outputs; `others` are further names of the module. `cuts`
    are the ranges of outputs that this rank has; none: all. Outputs of several kinds, such as
    queries and keys, lie one kind behind the other, and have a range in each."""

    module: str
    out_features: int
    others: tuple[str, ...] = ()
    cuts: tuple[Cut, ...] = ()

    @property
    def outputs(self) -> tuple[Cut, ...]:
        """The ranges of its outputs."""
        return self.cuts or (Cut(0, self.out_features, self.out_features),)

    @property
    def whole_size(self) -> int:
        """Its outputs on all ranks together."""
        return sum(each.whole for each in self.outputs)


class WeightPart(NamedTuple):
    """Rows of a weight that have one format. None: they are in the model's dtype."""

    num_rows: int
    format: WeightFormat | None


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers that read the same input, computed as one, their outputs side by side.

    `name` is such as "qkv". `fused` is the module that computes all of them where they are one: the
    checkpoint has that instead of its members if it `is_stored_fused`. `formats` are of the weights
    of the `stored` modules; without any all are in the model's dtype. In a checkpoint they are
    [out, in], or [in, out] if they are `is_transposed`.

    `in_cut` is the range of inputs that this rank has; None: all. Such outputs are one term of the
    sum over ranks, and the first rank's has the bias.

    If it `is_clipped`, each member's inputs and outputs are clipped to bounds of its own: numbers
    beside the member in the checkpoint.
    """

    name: str
    members: tuple[Member, ...]
    in_features: int
    has_bias: bool = False
    is_transposed: bool = False
    fused: str = ""
    is_stored_fused: bool = False
    formats: tuple[WeightFormat | None, ...] = ()
    in_cut: Cut | None = None
    is_clipped: bool = False

    def __post_init__(self) -> None:
        assert not self.is_clipped or not (self.is_stored_fused or self.in_cut)
        assert not self.formats or len(self.formats) == len(self.stored)

    @property
    def out_features(self) -> int:
        return sum(member.out_features for member in self.members)

    @property
    def num_rows(self) -> int:
        """The rows of its weight."""
        return self.out_features

    @property
    def stored(self) -> tuple[Member, ...]:
        """The modules whose weights the checkpoint has, in the order of their outputs."""
        return (Member(self.fused, self.out_features),) if self.is_stored_fused else self.members

    @property
    def parts(self) -> tuple[WeightPart, ...]:
        """Its rows by format; neighbours of one format are one part."""
        formats = self.formats or (None,) * len(self.stored)
        each_part = zip(formats, self.stored, strict=True)
        return tuple(
            WeightPart(sum(member.out_features for _, member in group), form)
            for form, group in groupby(each_part, key=itemgetter(0))
        )


@dataclass(frozen=True, slots=True)
class ExpertsProjection:
    """Linear layers of every expert that read the same input, computed as one. `members` name the
    layers of all experts, such as "mlp.experts.gate_proj": one expert's in the checkpoint is
    "mlp.experts.3.gate_proj".

    `num_experts` are the ones that this rank has: `cut` among all; None: all. `in_cut` is as in
    `Projection`.

    `parameter` is the one tensor that a checkpoint may have of all experts and members,
    [experts, out, in], or [experts, in, out] if it `is_transposed`; a file may have either if it
    `may_be_transposed`. Outputs of the members take turns if it `is_interleaved`, else they lie one
    behind the other. `parameter`_bias is its bias, [experts, out]. `format` is of the weights of
    all experts; None: the model's dtype.
    """

    name: str
    members: tuple[Member, ...]
    in_features: int
    num_experts: int
    parameter: str
    has_bias: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False
    may_be_transposed: bool = False
    format: WeightFormat | None = None
    in_cut: Cut | None = None
    cut: Cut | None = None

    @property
    def experts(self) -> Cut:
        """The experts that this rank has."""
        return self.cut or Cut(0, self.num_experts, self.num_experts)

    @property
    def out_features(self) -> int:
        """The outputs of one expert."""
        return sum(member.out_features for member in self.members)

    @property
    def num_rows(self) -> int:
        """The rows of its weight, in which experts lie below each other."""
        return self.num_experts * padded_rows(self.out_features)

    @property
    def parts(self) -> tuple[WeightPart, ...]:
        """Its rows, which all have one format."""
        return (WeightPart(self.num_rows, self.format),)
