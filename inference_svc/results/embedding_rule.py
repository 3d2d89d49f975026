"""How a model embeds: the tokens that it pools, and the lengths and prompts that it has."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Pooling(enum.Enum):
    """The tokens of a prompt whose hidden states are averaged; NONE: each token has a vector."""

    LAST = "last"
    MEAN = "mean"
    FIRST = "first"
    NONE = "none"

    def positions(self, num_prompt: int) -> tuple[int, int]:
        """Returns the first of the pooled tokens, and the end of them."""
        if self is Pooling.LAST:
            return num_prompt - 1, num_prompt
        return 0, 1 if self is Pooling.FIRST else num_prompt


def sigmoid(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the sigmoid of each value, computed in fp64."""
    # exp of a large number would overflow, which is a warning; of a negative one it becomes 0.
    power = np.exp(-np.abs(values.astype(np.float64)))
    return (np.where(values >= 0, 1.0, power) / (1 + power)).astype(np.float32)


class DenseActivation(enum.Enum):
    """What a dense layer does to its outputs."""

    IDENTITY = "Identity"
    TANH = "Tanh"
    RELU = "ReLU"
    SIGMOID = "Sigmoid"

    def __call__(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if self is DenseActivation.TANH:
            return np.tanh(values)
        if self is DenseActivation.RELU:
            return np.maximum(values, np.float32(0))
        if self is DenseActivation.SIGMOID:
            return sigmoid(values)
        return values


class DenseLayer(NamedTuple):
    """A layer behind the pooling: fp32 [out, in], perhaps a bias [out], and what follows."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    activation: DenseActivation

    def __call__(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns [out] of [in]."""
        made = self.weight @ vector
        return self.activation(made if self.bias is None else made + self.bias)


@dataclass(frozen=True, slots=True)
class EmbeddingRule:
    """How a model embeds: vectors of `size` numbers, pooled and normalised in this way unless a
    request says otherwise; `dense` layers make them of pooled hidden states, of `hidden_size`
    numbers, 0 for as many. `dimensions` are the lengths that a vector may be cut to; none: any.
    `prompts` are texts that a request may have put before its inputs, by name, and
    `default_prompt` the name of the one that it has otherwise. An input has at most `max_tokens`, 0
    for as many as the context, and is in lower case if the model `lowercases`. `refusal` says why
    the server does not embed; "": it does."""

    size: int = 0
    pooling: Pooling = Pooling.LAST
    is_normalised: bool = True
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_tokens: int = 0
    lowercases: bool = False
    hidden_size: int = 0
    dense: tuple[DenseLayer, ...] = field(default=(), compare=False)
    refusal: str = ""

    @property
    def state_size(self) -> int:
        """Numbers of a hidden state, which is the vector of a token."""
        return self.hidden_size or self.size


NO_EMBEDDINGS = EmbeddingRule(refusal="it has no hidden states here")
"""The rule of a server of which nothing is known."""
