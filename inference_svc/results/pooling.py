"""Embeddings: the final hidden states of a prompt's tokens, pooled to one vector, or as they are.

The engine returns sums of hidden states, or the states of each token, a part for each step that has
computed some of the tokens; `pooled` makes vectors of these. So a step keeps nothing of a sequence,
and a preempted one sums no token twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_svc.results.base import FP32_BYTES, OBJECT_BYTES, Kind, Option, Scope, Server
from inference_svc.results.embedding_rule import DenseLayer, EmbeddingRule, Pooling
from servicekit.errors import InvalidArgument

TINY = 1e-12
"""Shorter vectors are divided by this instead of their length, as by torch's `normalize`."""


@dataclass(frozen=True, slots=True)
class PoolingOption(Option):
    """One vector of the prompt. None stands for the model's own choice, as does 0 for
    `dimensions`; once it is known which model serves the request, they have its values, and `size`
    is the length of the model's vectors."""

    scope: ClassVar[Scope] = Scope.POOLED
    kind = Kind.EMBED

    pooling: Pooling | None = None
    is_normalised: bool | None = None
    dimensions: int = 0
    size: int = 0

    def served_by(self, server: Server) -> PoolingOption:
        """See `Option`. Raises InvalidArgument for a server that does not embed, and naming
        `dimensions` that its vectors do not have."""
        rule = server.embedding
        if rule.refusal:
            raise InvalidArgument(
                f"{server.base_model} does not embed: {rule.refusal}", subject="model"
            )
        return replace(
            self,
            pooling=rule.pooling if self.pooling is None else self.pooling,
            is_normalised=(
                rule.is_normalised if self.is_normalised is None else self.is_normalised
            ),
            dimensions=_checked_dimensions(self, rule, server.base_model),
            size=rule.state_size,
        )

    def positions(self, num_prompt: int) -> tuple[int, int]:
        assert self.pooling is not None, "the option is the server's"
        return self.pooling.positions(num_prompt)

    def prompt_bytes(self, num_tokens: int) -> int:
        return OBJECT_BYTES + FP32_BYTES * self.size * (num_tokens if self.per_token else 1)

    @property
    def per_token(self) -> bool:
        """Whether each token has a vector of its own."""
        return self.pooling is Pooling.NONE


def _checked_dimensions(option: PoolingOption, rule: EmbeddingRule, model: str) -> int:
    """Returns the length of the vectors. Raises InvalidArgument."""
    size = rule.state_size if option.per_token else rule.size
    dimensions, allowed = option.dimensions or size, (*rule.dimensions, size)
    if rule.dimensions and dimensions not in allowed:
        listed = ", ".join(map(str, sorted(set(allowed))))
        raise InvalidArgument(
            f"dimensions: {model} has vectors of {listed}, not of {dimensions}",
            subject="dimensions",
        )
    if not 1 <= dimensions <= size:
        raise InvalidArgument(
            f"dimensions must be from 1 to {size}, the length of {model}'s vectors, not "
            f"{dimensions}",
            subject="dimensions",
        )
    return dimensions


class HiddenSum(NamedTuple):
    """The sum of the final hidden states of neighbouring tokens of a prompt: `total` is fp32
    [size], as bytes."""

    first_position: int
    num_tokens: int
    total: bytes

    @property
    def scope(self) -> Scope:
        return Scope.POOLED

    @property
    def end(self) -> int:
        return self.first_position + self.num_tokens

    @property
    def num_bytes(self) -> int:
        return OBJECT_BYTES + len(self.total)

    def plus(self, following: HiddenSum) -> HiddenSum:
        """Returns the sum together with that of the tokens behind it."""
        total = np.frombuffer(self.total, np.float32) + np.frombuffer(following.total, np.float32)
        num_tokens = self.num_tokens + following.num_tokens
        return HiddenSum(self.first_position, num_tokens, total.tobytes())


class TokenStates(NamedTuple):
    """The final hidden states of neighbouring tokens of a prompt, each by itself: `states` is fp32
    [num_tokens, size], as bytes."""

    first_position: int
    num_tokens: int
    states: bytes

    @property
    def scope(self) -> Scope:
        return Scope.POOLED

    @property
    def end(self) -> int:
        return self.first_position + self.num_tokens

    @property
    def num_bytes(self) -> int:
        return OBJECT_BYTES + len(self.states)

    @property
    def rows(self) -> NDArray[np.float32]:
        """[num_tokens, size]"""
        return np.frombuffer(self.states, np.float32).reshape(self.num_tokens, -1)


def token_vectors(states: NDArray[np.float32], option: PoolingOption) -> NDArray[np.float32]:
    """Returns the vectors of tokens, [tokens, dimensions], from their states, [tokens, size]: each
    cut to the first `dimensions`, and then, if asked for, of length 1."""
    vectors = states[:, : option.dimensions]
    if option.is_normalised:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.float32(TINY))
    return vectors


def pooled(
    parts: Iterable[HiddenSum], option: PoolingOption, dense: Iterable[DenseLayer] = ()
) -> NDArray[np.float32]:
    """Returns the vector of a prompt, [dimensions], from all of its parts: the mean of its pooled
    tokens, behind the `dense` layers, cut to the first `dimensions`, and then, if asked for, of
    length 1."""
    total, num_tokens = np.zeros(option.size, np.float32), 0
    for part in parts:
        total += np.frombuffer(part.total, np.float32)
        num_tokens += part.num_tokens
    assert num_tokens, "a prompt has tokens"
    vector = total / np.float32(num_tokens)
    for layer in dense:
        vector = layer(vector)
    vector = vector[: option.dimensions]
    if option.is_normalised:
        vector = vector / np.float32(max(float(np.linalg.norm(vector)), TINY))
    return vector
