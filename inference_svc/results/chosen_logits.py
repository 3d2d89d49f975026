"""Logits of a few tokens behind a prompt, by which a model judges it: "no" and "yes"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from inference_svc.results.base import FP32_BYTES, OBJECT_BYTES, Kind, Option, Scope


@dataclass(frozen=True, slots=True)
class ChosenLogitsOption(Option):
    """The logits behind the prompt of the tokens of these `texts`; `token_ids` are theirs, once the
    request's tokenizer is known."""

    scope: ClassVar[Scope] = Scope.POOLED
    kind = Kind.SCORE

    texts: tuple[str, ...]
    token_ids: tuple[int, ...] = ()

    def positions(self, num_prompt: int) -> tuple[int, int]:
        return num_prompt - 1, num_prompt

    def prompt_bytes(self, num_tokens: int) -> int:
        return OBJECT_BYTES + FP32_BYTES * len(self.texts)


class ChosenLogits(NamedTuple):
    """The logits behind a prompt of `end` tokens: fp32, as bytes, in the order of the option's
    tokens."""

    end: int
    values: bytes

    @property
    def scope(self) -> Scope:
        return Scope.POOLED

    @property
    def num_bytes(self) -> int:
        return OBJECT_BYTES + len(self.values)

    def share_of_last(self) -> float:
        """Returns the probability of the last of the tokens among them."""
        values = np.frombuffer(self.values, np.float32).astype(np.float64)
        shares = np.exp(values - values.max())
        return float(shares[-1] / shares.sum())
