"""Outputs of a classifier for a prompt, or for each of its tokens: of the model's head, or of its
adapter's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_svc.results.base import FP32_BYTES, OBJECT_BYTES, Kind, Option, Scope, Server
from inference_svc.results.classifier_rule import MAX_LABELS
from inference_svc.results.embedding_rule import Pooling
from servicekit.errors import InvalidArgument

PER_TOKEN = "per_token"
"""The subject of errors about labels of tokens."""


@dataclass(frozen=True, slots=True)
class ClassLogitsOption(Option):
    """The outputs of a classifier, of the hidden states of the prompt's tokens that `pooling` says;
    or of each token, if `per_token`, where None stands for the model's own choice. The server knows
    these. The head, which may be an adapter's own, has at most `num_labels`. If it `is_score`, the
    prompt is a pair of texts, and the head's only output says how relevant the second is."""

    scope: ClassVar[Scope] = Scope.POOLED

    pooling: Pooling = Pooling.LAST
    per_token: bool | None = None
    num_labels: int = MAX_LABELS
    is_score: bool = False

    @property
    def kind(self) -> Kind:
        return Kind.SCORE if self.is_score else Kind.CLASSIFY

    def served_by(self, server: Server) -> ClassLogitsOption:
        """See `Option`. Raises InvalidArgument for a server that does not classify, and for one
        that does not classify tokens, or prompts, where the request asks for these."""
        if server.classifier.refusal:
            verb = "score" if self.is_score else "classify"
            raise InvalidArgument(
                f"{server.base_model} does not {verb}: {server.classifier.refusal}",
                subject="model",
            )
        rule = server.classifier
        if self.is_score and rule.per_token:
            raise InvalidArgument(
                f"{server.base_model} does not score: it has labels of each token", subject="model"
            )
        if self.per_token and not rule.per_token and rule.pooling is not Pooling.LAST:
            raise InvalidArgument(
                f"{server.base_model} classifies whole inputs: it has no labels of each token",
                subject=PER_TOKEN,
            )
        if self.per_token is False and rule.per_token:
            raise InvalidArgument(
                f"{server.base_model} has labels of each token, and none of whole inputs: ask for "
                "these (per_token; over HTTP /pooling with task token_classify)",
                subject=PER_TOKEN,
            )
        per_token = rule.per_token if self.per_token is None else self.per_token
        return replace(self, pooling=rule.pooling, per_token=per_token)

    def positions(self, num_prompt: int) -> tuple[int, int]:
        return (0, num_prompt) if self.per_token else self.pooling.positions(num_prompt)

    def prompt_bytes(self, num_tokens: int) -> int:
        if not self.per_token:
            return OBJECT_BYTES + FP32_BYTES * MAX_LABELS
        return OBJECT_BYTES + FP32_BYTES * self.num_labels * num_tokens


class ClassLogits(NamedTuple):
    """A classifier's outputs for a prompt, or for neighbouring tokens of it, if there are several:
    fp32 [num_tokens, labels], as bytes; none if there is no head. `is_own`: the head is the
    adapter's own."""

    end: int
    values: bytes
    is_own: bool
    num_tokens: int = 1

    @property
    def scope(self) -> Scope:
        return Scope.POOLED

    @property
    def num_bytes(self) -> int:
        return OBJECT_BYTES + len(self.values)

    @property
    def logits(self) -> NDArray[np.float32]:
        """[labels], of the only token."""
        return np.frombuffer(self.values, np.float32)

    @property
    def rows(self) -> NDArray[np.float32]:
        """[num_tokens, labels]"""
        return np.frombuffer(self.values, np.float32).reshape(self.num_tokens, -1)
