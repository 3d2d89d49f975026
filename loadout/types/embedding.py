"""Types of the vectors and labels of inputs, and of the scores of documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadout.types.generation import AdapterIdentity, Timings, Usage

Pooling = Literal["last", "mean", "first", "none"]
"""The tokens of an input whose final hidden states become its vector; "none": each token has a
vector of its own."""
Truncation = Literal["end", "start"]
"""The end of an input at which tokens are dropped, if it is too long."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of an input. `adapter` is None for the base model, and for several adapters; those
    are in `adapters`."""

    request_id: str
    index: int
    """Which input this is, from 0."""
    vector: memoryview[float]
    """Its numbers, float32, a view for `numpy.asarray`; with pooling "none" [tokens, numbers]."""
    adapter: AdapterIdentity | None
    adapters: tuple[AdapterIdentity, ...]
    usage: Usage | None
    """Tokens of this input."""
    timings: Timings | None
    """Times of this input."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a document; `adapter` and `adapters` are as in Embedding."""

    request_id: str
    index: int
    """Which document this is, from 0."""
    score: float
    """How relevant it is, from 0 to 1."""
    adapter: AdapterIdentity | None
    adapters: tuple[AdapterIdentity, ...]
    usage: Usage | None
    """Tokens of its prompt."""
    timings: Timings | None
    """Times of this document."""


@dataclass(frozen=True, slots=True)
class Classification:
    """The labels of an input; `adapter` and `adapters` are as in Embedding."""

    request_id: str
    index: int
    """Which input this is, from 0."""
    label: str
    """The most probable label: the name that the model or the adapter gives it, or else "LABEL_0",
    "LABEL_1", ..."""
    label_index: int
    """Its number, from 0."""
    probabilities: memoryview[float]
    """The probability of each label, float32, a view without a copy."""
    adapter: AdapterIdentity | None
    adapters: tuple[AdapterIdentity, ...]
    usage: Usage | None
    """Tokens of this input."""
    timings: Timings | None
    """Times of this input."""


@dataclass(frozen=True, slots=True)
class TokenClassification:
    """The labels of each token of an input; `adapter` and `adapters` are as in Embedding."""

    request_id: str
    index: int
    """Which input this is, from 0."""
    labels: tuple[str, ...]
    """The names of all labels."""
    probabilities: memoryview[float]
    """The probability of each label of each token, float32, [tokens, labels]."""
    adapter: AdapterIdentity | None
    adapters: tuple[AdapterIdentity, ...]
    usage: Usage | None
    """Tokens of this input."""
    timings: Timings | None
    """Times of this input."""
