"""Vectors from sums of hidden states, and the choices that a model allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from inference_svc.results.classifier_rule import Activation
from inference_svc.results.embedding_rule import (
    NO_EMBEDDINGS,
    DenseActivation,
    EmbeddingRule,
    Pooling,
)
from inference_svc.results.pooling import (
    HiddenSum,
    PoolingOption,
    TokenStates,
    pooled,
    token_vectors,
)
from servicekit.errors import InvalidArgument


@dataclass
class Facts:
    embedding: EmbeddingRule
    base_model: str = "base"
    expert_token_bytes: int = 0


def served(option: PoolingOption, **rule: Any) -> PoolingOption:
    return option.served_by(Facts(EmbeddingRule(8, **rule)))


def test_the_model_decides_unless_the_request_does() -> None:
    rule = {"pooling": Pooling.MEAN, "is_normalised": False}
    assert served(PoolingOption(), **rule) == PoolingOption(Pooling.MEAN, False, 8, 8)
    own = PoolingOption(Pooling.FIRST, True, 3)
    assert served(own, **rule) == PoolingOption(Pooling.FIRST, True, 3, 8)


@pytest.mark.parametrize(
    ("dimensions", "listed", "message"),
    [
        (9, (), "from 1 to 8, the length of base's vectors, not 9"),
        (3, (2, 4), "base has vectors of 2, 4, 8, not of 3"),
        (9, (2, 4), "base has vectors of 2, 4, 8, not of 9"),
    ],
)
def test_dimensions_that_a_model_lacks_are_refused(
    dimensions: int, listed: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        served(PoolingOption(dimensions=dimensions), dimensions=listed)
    assert caught.value.subject == "dimensions"


@pytest.mark.parametrize("dimensions", [2, 4, 8])
def test_dimensions_that_a_model_lists_are_served(dimensions: int) -> None:
    found = served(PoolingOption(dimensions=dimensions), dimensions=(2, 4))
    assert found.dimensions == dimensions


def test_a_server_that_does_not_embed_says_why() -> None:
    with pytest.raises(InvalidArgument, match="base does not embed: it has no hidden") as caught:
        PoolingOption().served_by(Facts(NO_EMBEDDINGS))
    assert caught.value.subject == "model"


@pytest.mark.parametrize(
    ("pooling", "positions"),
    [(Pooling.LAST, (4, 5)), (Pooling.MEAN, (0, 5)), (Pooling.FIRST, (0, 1))],
)
def test_pooled_tokens(pooling: Pooling, positions: tuple[int, int]) -> None:
    assert pooling.positions(5) == positions


@pytest.mark.parametrize("is_normalised", [True, False])
def test_a_mean_of_parts_is_the_mean_of_all(is_normalised: bool) -> None:
    states = np.random.default_rng(0).standard_normal((7, 8)).astype(np.float32)
    parts = [
        HiddenSum(start, end - start, states[start:end].sum(0).tobytes())
        for start, end in ((0, 3), (3, 4), (4, 7))
    ]
    found = pooled(parts, PoolingOption(Pooling.MEAN, is_normalised, 5, 8))
    mean = states.mean(0)[:5]
    wanted = mean / np.linalg.norm(mean) if is_normalised else mean
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert found.dtype == np.float32


def test_a_vector_of_zeros_stays() -> None:
    part = HiddenSum(0, 1, bytes(4 * 8))
    assert not pooled([part], PoolingOption(Pooling.LAST, True, 8, 8)).any()


@pytest.mark.parametrize("activation", [Activation.SIGMOID, DenseActivation.SIGMOID])
def test_the_sigmoid_of_large_numbers_does_not_overflow(activation: Any) -> None:
    """A warning is an error here, and a line of the log in a server."""
    values = np.array([-3e38, -800, -2, 0, 2, 800, 3e38], np.float32)
    some = 1 / (1 + math.exp(2))
    wanted = [0, 0, some, 0.5, 1 - some, 1, 1]
    np.testing.assert_allclose(activation(values), np.array(wanted, np.float32), rtol=1e-6)


def test_neighbouring_sums_are_one() -> None:
    first, second = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    found = HiddenSum(2, 3, first.tobytes()).plus(HiddenSum(5, 1, second.tobytes()))
    assert found == HiddenSum(2, 4, (first + second).tobytes())
    assert found.end == 6


@pytest.mark.parametrize("is_normalised", [True, False])
def test_vectors_of_tokens_come_in_parts(is_normalised: bool) -> None:
    option = PoolingOption(Pooling.NONE, is_normalised, 3, 8)
    states = np.arange(1, 41, dtype=np.float32).reshape(5, 8)
    parts = [TokenStates(at, n, states[at : at + n].tobytes()) for at, n in ((0, 2), (2, 3))]
    rows = np.concatenate([part.rows for part in parts])
    found, cut = token_vectors(rows, option), states[:, :3]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True) if is_normalised else 1
    np.testing.assert_allclose(found, cut / lengths, rtol=1e-6)
    assert (parts[1].end, option.positions(5)) == (5, (0, 5))
    assert option.prompt_bytes(5) - option.prompt_bytes(0) == states.nbytes
