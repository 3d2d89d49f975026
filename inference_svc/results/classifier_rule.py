"""How a server classifies: the labels of the model's own head, and their probabilities."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference_svc.results.embedding_rule import DenseActivation, Pooling, sigmoid

MAX_LABELS = 1024
"""Labels of a head, the model's or an adapter's: all requests wait for its product in a step, and
each answer has all outputs."""


class Activation(enum.Enum):
    """What makes probabilities of a classifier's outputs."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"

    def __call__(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns [..., labels] of [..., labels]."""
        if self is Activation.NONE:
            return logits
        if self is Activation.SIGMOID:
            return sigmoid(logits)
        values = logits.astype(np.float64)
        shares = np.exp(values - values.max(axis=-1, keepdims=True))
        return (shares / shares.sum(axis=-1, keepdims=True)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ClassifierRule:
    """How a server classifies: the model's own head has these `labels`, none if it has no head.
    `activation` None: softmax of several outputs, and the sigmoid of one. `refusal` says why the
    server does not classify; "": it does. The head reads the mean of the tokens that `pooling`
    says; the model's own is for each token, if `per_token`. `score_activation` makes a score of the
    only output for a pair of texts, unless a `score_refusal` says why the server does not know it:
    the output as it is can be had."""

    labels: tuple[str, ...] = ()
    activation: Activation | None = None
    refusal: str = ""
    pooling: Pooling = Pooling.LAST
    per_token: bool = False
    score_activation: DenseActivation = DenseActivation.SIGMOID
    score_refusal: str = ""

    @property
    def head_module(self) -> str:
        """The name by which transformers knows the head, and PEFT saves an adapter's own."""
        return "score" if self.pooling is Pooling.LAST else "classifier"

    def activation_of_score(self, *, is_raw: bool) -> DenseActivation:
        return DenseActivation.IDENTITY if is_raw else self.score_activation

    def activation_of(self, num_outputs: int) -> Activation:
        if self.activation is not None:
            return self.activation
        return Activation.SIGMOID if num_outputs == 1 else Activation.SOFTMAX


NO_CLASSIFIER = ClassifierRule(
    refusal="it has no classification head, and the server was started without --classifiers"
)
