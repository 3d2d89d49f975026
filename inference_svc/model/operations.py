"""The operations of a step, as data: `model.walk` lists the operations of a decoder.

A backend executes a list, or makes its own program of it. All that depends on a model's structure
is read off the same list: parameters, the targets of adapters, and the memory of a step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from inference_svc.model.description import (
    Activation,
    Attention,
    ClampedSwiglu,
    Cut,
    Experts,
    ExpertsProjection,
    Head,
    Norm,
    Projection,
    QueryGrowth,
    layer_path,
)
from inference_svc.model.rope import Rope

EMBEDDING_KEY, HEAD_KEY = "embedding", "head"
"""The keys of the embedding's table, and of the head's projection."""


class Rows(enum.Enum):
    """The rows of a value: the step's tokens, the tokens that get logits, the pairs of a token and
    an expert, or the cells of a tower's patches."""

    TOKENS = "tokens"
    LOGITS = "logits"
    PAIRS = "pairs"
    CELLS = "cells"


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An activation, [rows, width], in the model's dtype or, if it `is_wide`, in fp32. Operations
    may write it anew, in place or not. A backend chooses the form of a value without width."""

    name: str
    width: int
    rows: Rows = Rows.TOKENS
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding: `num_rows` of `size` elements, by token. This rank has the tokens of `cut`;
    None: all. `copies` are (row, the row in its place); `parts`: saved as [parts, rows, size]."""

    key: str
    module: str
    num_rows: int
    size: int
    cut: Cut | None = None
    copies: tuple[tuple[int, int], ...] = ()
    parts: int = 0


@dataclass(frozen=True, slots=True)
class Numbers:
    """A tensor of the checkpoint, by its whole name, that is held in fp32, [size]. The checkpoint
    has it in a `shape` of its own, if it says one. `cuts` are the ranges of its first dimension
    that this rank has, each of one kind of numbers, which lie one kind behind the other; none:
    all. Older files have another name for it if it `is_norms_bias`."""

    name: str
    size: int
    shape: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ()
    is_norms_bias: bool = False

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor, of all ranks."""
        shape = self.shape or (self.size,)
        return (sum(each.whole for each in self.cuts), *shape[1:]) if self.cuts else shape


@dataclass(frozen=True, slots=True)
class Scalar:
    """A tensor of the checkpoint with one number of a layer."""

    name: str
    layer: int


WeightSpec: TypeAlias = Table | Projection | ExpertsProjection | Norm | Numbers | Scalar


class Weight(NamedTuple):
    """A weight that an operation reads: of a layer or, None, of the whole model."""

    spec: WeightSpec
    layer: int | None


class Run(NamedTuple):
    """Columns that lie together: where they are, where they go, and how many they are."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation that reads `inputs` and writes `out`, which may be one of them. `layer` is the
    layer whose weights it reads, None: weights of the whole model."""

    inputs: tuple[Value, ...]
    out: Value
    layer: int | None

    @property
    def of_layer(self) -> int:
        """The layer of an operation of layers."""
        assert self.layer is not None
        return self.layer

    @property
    def weights(self) -> Iterator[Weight]:
        """In the order of the model's parameters."""
        for each in self._specs:
            if each is not None:
                yield Weight(each, each.layer if isinstance(each, Scalar) else self.layer)

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Embed(Op):
    """Looks up the step's tokens in a table. Adapters may change it if it `is_adapted`. Of a table
    that is cut, the rank that has a token's row gives it to all."""

    table: Table
    is_adapted: bool = False

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.table,)


@dataclass(frozen=True, slots=True, eq=False)
class Scale(Op):
    """Multiplies in place, by the number or, if it `is_rounded`, as the model's dtype has it."""

    scale: float
    is_rounded: bool


@dataclass(frozen=True, slots=True, eq=False)
class Angles(Op):
    """Computes a rotation's angles from positions: cos and then sin, each of half the width."""

    rope: Rope
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Growth(Op):
    """Computes the factor of each token's queries from its position."""

    growth: QueryGrowth


@dataclass(frozen=True, slots=True, eq=False)
class Gather(Op):
    """Goes on with the tokens that get logits. With `part`, only this part of the input's width, in
    parts as wide as `out`."""

    part: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AddNorm(Op):
    """Adds to the residual stream, and norms the sum: hidden = sum_scale * (hidden + delta_scale *
    delta); out = norm(hidden).

    `inputs` are the stream and, if there is one, the delta. Without a norm `out` is the stream. If
    `out` has the rows that get logits and the stream all tokens, it computes only these, and the
    stream stays as it is.
    """

    norm: Norm | None
    delta_scale: float = 1.0
    sum_scale: float | Scalar = 1.0

    @property
    def hidden(self) -> Value:
        return self.inputs[0]

    @property
    def delta(self) -> Value | None:
        return self.inputs[1] if len(self.inputs) > 1 else None

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        scale = self.sum_scale if isinstance(self.sum_scale, Scalar) else None
        return scale, self.norm, norm_bias(self.norm, self.layer)


@dataclass(frozen=True, slots=True, eq=False)
class NormOf(Op):
    """Norms a value; a norm of fewer elements than its width norms each part of it."""

    norm: Norm

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return self.norm, norm_bias(self.norm, self.layer)


P_co = TypeVar("P_co", bound=Projection | ExpertsProjection, covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class Product(Op, Generic[P_co]):
    """Multiplies with a projection's weight, and adds the adapters of its group."""

    projection: P_co
    group: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", key_of(self.projection.name, self.layer))

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.projection,)


@dataclass(frozen=True, slots=True, eq=False)
class Project(Product[Projection]):
    """A product of the tokens. If the `reader` can, it adds the adapters itself: they may be
    computed beside the product then."""

    reader_adds: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RotateAndStore(Op):
    """Norms and rotates the heads of q, k and v, in place, and stores keys and values. `inputs` are
    qkv, and the angles and the growth if it has these."""

    attention: Attention
    angles: Value | None
    growth: Value | None

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.attention.q_norm, self.attention.k_norm, self.attention.v_norm)


@dataclass(frozen=True, slots=True, eq=False)
class Attend(Op):
    """Attends from the queries in qkv to the keys and values that are stored."""

    attention: Attention
    sinks: Numbers | None = field(init=False)

    def __post_init__(self) -> None:
        attention, cut = self.attention, self.attention.head_cut
        cuts = () if cut is None else (cut,)
        sinks = numbers_of(attention.sinks, attention.num_heads, self.layer, cuts=cuts)
        object.__setattr__(self, "sinks", sinks)

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.sinks,)


@dataclass(frozen=True, slots=True, eq=False)
class Regroup(Op):
    """Copies runs of columns to other places, such as a part of each head."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GateHeads(Op):
    """Multiplies attention's output, in place, by the sigmoid of its gate. `inputs` are both."""


@dataclass(frozen=True, slots=True, eq=False)
class Gate(Op):
    """activation(gate) * up. `inputs` are gate and up side by side; or the gate, and the value that
    stands for up: all of it or, with `part`, this part of its width, in parts as wide as `out`."""

    activation: Activation | ClampedSwiglu
    part: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Route(Op):
    """Chooses the experts of each token by the router's logits, and sorts the pairs of tokens and
    experts by expert. Pairs of experts that other ranks have are left out."""

    experts: Experts
    bias: Numbers | None = field(init=False)
    expert_scales: Numbers | None = field(init=False)

    def __post_init__(self) -> None:
        router, count = self.experts.router, self.experts.num_experts
        object.__setattr__(self, "bias", numbers_of(router.bias, count, self.layer))
        scales = numbers_of(router.expert_scales, count, self.layer)
        object.__setattr__(self, "expert_scales", scales)

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.bias, self.expert_scales)


@dataclass(frozen=True, slots=True, eq=False)
class Spread(Op):
    """Copies the tokens of `inputs[0]` to their pairs, as the routing, `inputs[1]`, has them."""


@dataclass(frozen=True, slots=True, eq=False)
class ProjectExperts(Product[ExpertsProjection]):
    """A product of each pair with its expert's weight. `inputs` are the pairs and the routing."""


@dataclass(frozen=True, slots=True, eq=False)
class Combine(Op):
    """Sums each token's pairs by their weights, and the half that all share, times the sigmoid of
    its gate. `inputs` are the pairs and the routing, and `shared` and `gate` if there are any. A
    token's pairs may be on other ranks."""

    shared: Value | None = None
    gate: Value | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SumRanks(Op):
    """Sums a value of which each rank has a term, in place."""


class NormedColumns(NamedTuple):
    """Columns from `start` on, of a norm over the same columns of all ranks."""

    norm: Norm
    start: int

    @property
    def range(self) -> slice:
        return slice(self.start, self.start + self.norm.size)


@dataclass(frozen=True, slots=True, eq=False)
class SumSquares(Op):
    """Sums the squares of each of the `normed` columns: fp32 [T, norms]."""

    normed: tuple[NormedColumns, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NormBySums(Op):
    """Norms columns, in place, by the sums of squares over `num_ranks` ranks, each of which has as
    many. `inputs` are the value and the sums, which are SumSquares', summed over ranks."""

    normed: tuple[NormedColumns, ...]
    num_ranks: int

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return tuple(each.norm for each in self.normed)


@dataclass(frozen=True, slots=True, eq=False)
class Receive(Op):
    """Gets a value that the rank with the same index in another stage hands on."""

    stage: int


@dataclass(frozen=True, slots=True, eq=False)
class HandOn(Op):
    """Hands a value, which stays as it is, to the same rank of another stage."""

    stage: int


@dataclass(frozen=True, slots=True, eq=False)
class Logits(Op):
    """Computes the logits of the last norm. A tied head without a format of its own shares the
    table's memory if a backend can; it has the `table` where no embedding does. Of a head that is
    cut, the logits of all ranks are put side by side, before adapters add to them."""

    head: Head
    projection: Projection
    part_size: int = 0
    table: Table | None = None

    @property
    def cut(self) -> Cut | None:
        """The tokens whose logits this rank computes, at most `part_size`; None: all."""
        cuts = self.projection.members[0].cuts
        return cuts[0] if cuts else None

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return (self.table,) if self.head.is_shared else (self.projection,)


class Operations(NamedTuple):
    """The operations of a step: of all layers, and then of the last norm and the head, for the
    tokens that get logits."""

    layers: tuple[Op, ...]
    head: tuple[Op, ...]

    @property
    def norm(self) -> tuple[Op, ...]:
        """The operations of the head up to the last norm, of an encoder all; none where another
        stage has it."""
        ends = [index for index, op in enumerate(self.head) if isinstance(op, Logits | Receive)]
        return self.head[: ends[0]] if ends else self.head

    @property
    def kept(self) -> tuple[Value, ...]:
        """The values of the layers that the head reads."""
        read = {value for op in self.head for value in op.inputs}
        return tuple(dict.fromkeys(op.out for op in self.layers if op.out in read))


class Listing(Protocol):
    """The walk, as mixers add operations to it. `angles` are by rotation and by size of heads."""

    ops: list[Op]
    angles: dict[tuple[Rope, int], Value]

    def value(
        self, name: str, width: int, rows: Rows | None = None, *, is_wide: bool = False
    ) -> Value:
        """Returns the value of this name and form."""

    def regroup(self, layer: int, x: Value, name: str, runs: tuple[Run, ...]) -> Value:
        """Copies runs of columns to a value of this name."""


def numbers_of(
    name: str,
    size: int,
    layer: int | None,
    shape: tuple[int, ...] = (),
    cuts: tuple[Cut, ...] = (),
) -> Numbers | None:
    assert layer is not None
    return Numbers(layer_path(layer, name), size, shape, cuts) if name else None


def norm_bias(norm: Norm | None, layer: int | None) -> Numbers | None:
    """Returns the bias of a norm of a layer or, None, of the whole model; None if it has none."""
    if norm is None or not norm.has_bias:
        return None
    return Numbers(f"{norm.path(layer)}.bias", norm.size, is_norms_bias=True)


def conv_kernels(
    name: str, channels: int, size: int, layer: int | None, cuts: tuple[Cut, ...]
) -> Numbers | None:
    """Returns the kernels of a convolution whose channels do not mix: `size` numbers for each.
    `cuts` are the channels of a rank."""
    return numbers_of(name, channels * size, layer, (channels, 1, size), cuts)


def key_of(name: str, layer: int | None) -> str:
    """Returns the key of a weight, or a group of adapters, such as "layers.3.qkv"."""
    return name if layer is None else f"layers.{layer}.{name}"


def weight_key(weight: Weight) -> str:
    """Returns the key of a weight in `ModelWeights`."""
    spec, layer = weight
    if isinstance(spec, Table):
        return spec.key
    if isinstance(spec, Norm):
        return norm_key(spec, layer)
    if isinstance(spec, Numbers | Scalar):
        return spec.name
    return key_of(spec.name, layer)


def norm_key(norm: Norm, layer: int | None) -> str:
    """Returns the key of a norm's weight: its module's path. Norms of a layer without weights share
    one that is 1."""
    if norm.module:
        return norm.path(layer)
    return key_of(f"{norm.kind.value} of {norm.size}, {norm.eps}, {norm.is_wide}", layer)
