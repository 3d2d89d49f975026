"""Mixers of tokens: attention, and recurrences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from inference_svc.model.description.modules import Cut, Norm, Projection
from inference_svc.model.rope import Rope


class QueryGrowth(NamedTuple):
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / length)) (Llama 4)."""

    beta: float
    length: int


class KVShape(NamedTuple):
    """The keys of one token in one layer; its values have the same shape."""

    num_kv_heads: int
    head_dim: int


class KVPlace(NamedTuple):
    """Where a layer's keys and values are: in the cache of the shape with this index, whose layer
    this is."""

    shape: int
    layer: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of `num_heads` queries in groups, which share keys and values.

    `scale` multiplies scores, which are bounded by `softcap`: cap * tanh(score / cap). `window` is
    how many positions a query attends to, its own included; None: all. `rope` None: positions do
    not enter. Norms are over a head, or, as their size says, over all heads; before the rotation,
    or behind it if `norms_rotated`. `kv_layer` is the layer whose keys and values it reads, None:
    its own. Where `values_are_keys`, values are the keys before their norm and rotation. `sinks` is
    the tensor with a number for each head: a score without a value, which takes part in the
    softmax. If it `has_gate`, `qkv` also makes gates, whose sigmoids multiply the heads' outputs.
    If it `only_looks_back`, the tokens of a picture do not see each other in both directions here.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv: Projection
    out: Projection
    rope: Rope | None
    window: int | None = None
    softcap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norms_rotated: bool = False
    kv_layer: int | None = None
    values_are_keys: bool = False
    query_growth: QueryGrowth | None = None
    sinks: str = ""
    has_gate: bool = False
    only_looks_back: bool = False

    def __post_init__(self) -> None:
        norms = (self.q_norm, self.k_norm, self.v_norm)
        assert len({norm.eps for norm in norms if norm is not None}) <= 1, "they are one operation"

    @property
    def norms_all_heads(self) -> bool:
        """Whether a norm of queries or keys is over all heads at once."""
        norms = (each for each in (self.q_norm, self.k_norm) if each is not None)
        return any(each.size != self.head_dim or each.cut is not None for each in norms)

    @property
    def head_cut(self) -> Cut | None:
        """The heads of queries that this rank has; None: all."""
        inputs = self.out.in_cut
        return None if inputs is None else Cut(*(size // self.head_dim for size in inputs))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A mixer that folds all tokens before into a state of a fixed size; each kind is a subclass,
    which `walk.MIXERS` lists the operations of. `out` is its last projection."""

    out: Projection

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parts of a sequence's state in one layer, in fp32."""
        raise NotImplementedError
