"""The parts that encoders have and decoders have not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from inference_svc.model.description.feed_forward import Activation
from inference_svc.model.description.modules import Norm, Projection
from inference_svc.model.rope import Rope
from inference_svc.results.embedding_rule import Pooling


@dataclass(frozen=True, slots=True)
class BothWays:
    """Attention of every token of a prompt to all tokens of it, before and after.

    `scale` multiplies scores. `reach` is how many positions away a query sees, to either side;
    None: all. `in_windows`: a patch sees the ones of its window alone. `rope` None: positions do
    not enter. `head_norms` are of each head's queries, keys and values, before the rotation; and
    then the quarters of a head of queries and keys are put in this order, `quarters`, if one is
    said: the rotation turns elements of the first half with ones of the second.
    """

    num_heads: int
    head_dim: int
    scale: float
    qkv: Projection
    out: Projection
    rope: Rope | None = None
    reach: int | None = None
    in_windows: bool = False
    head_norms: tuple[Norm, Norm, Norm] | None = None
    quarters: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        assert self.quarters is None or self.head_norms is not None, "they are one operation"

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim


class Positions(NamedTuple):
    """An embedding of positions: its module, its rows, and the row of the first position. With a
    `side` it is a square of so many rows each side, whose rows are blended for the places of a
    tile's patches. If it is `of_axes`, its first half has a row for each column of patches, and its
    second half one for each row of them."""

    module: str
    num_rows: int
    first: int = 0
    side: int = 0
    of_axes: bool = False

    @property
    def are_blended(self) -> bool:
        """Whether the embedding of a patch is a sum of several rows."""
        return self.side > 0 or self.of_axes


class EncoderHead(NamedTuple):
    """The modules of a classifier head of the tokens that `pooling` says: out(tanh(dense(x))), or
    out(norm(activation(dense(x)))), or without a `dense` (""): out(x). Adapters with a head of
    their own have both modules, if the dense one `is_adapters`; else only `out`."""

    dense: str
    out: str
    is_adapters: bool
    has_dense_bias: bool = True
    activation: Activation | None = None
    norm: Norm | None = None
    pooling: Pooling = Pooling.FIRST


TOKENS_HEAD = EncoderHead("", "classifier", is_adapters=False, pooling=Pooling.NONE)
"""The head of transformers' classes that label each token; ModernBERT keeps its own."""


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """What becomes of the tokens' embeddings before the first layer: `positions` add theirs, and a
    table of `num_token_types` rows, the module `token_types`, the row of each token's type: 1 from
    the second text of a pair on, else 0. The sum is normed, if there is a norm. Without
    `positions`, or with 0 types, nothing is added. The checkpoint may have tensors whose names
    begin with one of `unused`. `head` is the head that a classifier of this kind has.
    """

    norm: Norm | None
    positions: Positions | None = None
    token_types: str = ""
    num_token_types: int = 0
    unused: tuple[str, ...] = ()
    head: EncoderHead | None = None
