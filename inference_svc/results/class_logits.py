"""Outputs of a classifier for a prompt: of the model's head, or of its adapter's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_svc.results.base import FP32_BYTES, OBJECT_BYTES, Kind, Option, Scope, Server
from inference_svc.results.classifier_rule import MAX_LABELS
from inference_svc.results.embedding_rule import Pooling
from servicekit.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ClassLogitsOption(Option):
    """The outputs of a classifier, of the hidden states of the prompt's tokens that `pooling` says:
    the server knows."""

    scope: ClassVar[Scope] = Scope.POOLED
    kind: ClassVar[Kind] = Kind.CLASSIFY

    pooling: Pooling = Pooling.LAST

    def served_by(self, server: Server) -> ClassLogitsOption:
        """See `Option`. Raises InvalidArgument for a server that does not classify."""
        if server.classifier.refusal:
            raise InvalidArgument(
                f"{server.base_model} does not classify: {server.classifier.refusal}",
                subject="model",
            )
        return replace(self, pooling=server.classifier.pooling)

    def positions(self, num_prompt: int) -> tuple[int, int]:
        return self.pooling.positions(num_prompt)

    def prompt_bytes(self, num_tokens: int) -> int:
        return OBJECT_BYTES + FP32_BYTES * MAX_LABELS


class ClassLogits(NamedTuple):
    """A classifier's outputs: fp32 [labels], as bytes; none if there is no head. `is_own`: the head
    is the adapter's own."""

    end: int
    values: bytes
    is_own: bool

    @property
    def scope(self) -> Scope:
        return Scope.POOLED

    @property
    def num_bytes(self) -> int:
        return OBJECT_BYTES + len(self.values)

    @property
    def logits(self) -> NDArray[np.float32]:
        """[labels]"""
        return np.frombuffer(self.values, np.float32)
