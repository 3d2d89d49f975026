"""Vectors that engines make of prompts, and the oracle's."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_svc.core import FinishReason
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import (
    HiddenSum,
    PoolingOption,
    TokenStates,
    pooled,
    token_vectors,
)
from tests.support.inference.results import parts_of
from tests.support.models.zoo import Zoo
from tests.system.engines import Running

SIZE = 64
"""The length of the hidden states of zoos."""


def option(pooling: Pooling, *, is_normalised: bool = True, dimensions: int = SIZE) -> Any:
    return PoolingOption(pooling, is_normalised, dimensions, SIZE)


def embedding(running: Running, name: str, asked: PoolingOption) -> np.ndarray:
    """Returns a request's vector, or its tokens' vectors, once it has ended."""
    tokens, last = running.result(name)
    assert last.error is None, last.error
    assert tokens == []
    assert last.finish_reason is FinishReason.STOP
    if asked.per_token:
        rows = [part.rows for part in parts_of(running.outputs[name], TokenStates)]
        return token_vectors(np.concatenate(rows), asked)
    return pooled(parts_of(running.outputs[name], HiddenSum), asked)


def expected(zoo: Zoo, adapter: str, prompt: list[int], asked: PoolingOption) -> np.ndarray:
    hidden = zoo.hidden(adapter, prompt).numpy()
    chosen: np.ndarray = {
        Pooling.NONE: hidden,
        Pooling.LAST: hidden[-1],
        Pooling.FIRST: hidden[0],
        Pooling.MEAN: hidden.mean(0),
    }[asked.pooling or Pooling.LAST]
    vector = chosen[..., : asked.dimensions]
    if not asked.is_normalised:
        return vector
    return np.asarray(vector / np.linalg.norm(vector, axis=-1, keepdims=True))
