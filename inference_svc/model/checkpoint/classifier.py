"""The head of a model that classifies, and what makes probabilities of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.dense import read_named
from inference_svc.model.checkpoint.files import CONFIG, read_json
from inference_svc.model.checkpoint.tensors import opened, text_tensors
from inference_svc.model.description import SCORE, Activation, Decoder, Norm, NormKind
from inference_svc.model.layers import activate
from inference_svc.results import classifier_rule
from inference_svc.results.classifier_rule import MAX_LABELS
from inference_svc.results.embedding_rule import DenseActivation
from kernels.elementwise import NormWeight, rms_norm

_OLDER = "sbert_ce_default_activation_function"
"""The key of older files for the activation of a cross-encoder."""
_BY_PROBLEM = {
    "regression": classifier_rule.Activation.NONE,
    "single_label_classification": None,
    "multi_label_classification": classifier_rule.Activation.SIGMOID,
}


class ClassifierHead(NamedTuple):
    """A classifier's head: out(x), or out(tanh(dense(x))), each a weight [out, in] and perhaps a
    bias [out], of a float dtype. An `activation` stands in for tanh, and a `norm` follows it.
    Without an `out` it has no outputs, and waits for an adapter's."""

    out: Tensor | None = None
    bias: Tensor | None = None
    dense: Tensor | None = None
    dense_bias: Tensor | None = None
    activation: Activation | None = None
    norm: NormWeight | None = None

    def with_own(self, own: ClassifierHead) -> ClassifierHead:
        """Returns the head of an adapter that has its own `out`, and perhaps its own `dense`."""
        if own.dense is None:
            return self._replace(out=own.out, bias=own.bias)
        return own

    def __call__(self, states: Tensor) -> Tensor | None:
        """Returns the outputs, fp32 [N, labels], for hidden states, fp32 [N, hidden_size]; None if
        there are none."""
        if self.out is None:
            return None
        if self.dense is not None:
            made = _linear(states, self.dense, self.dense_bias)
            states = (
                torch.tanh(made) if self.activation is None else activate(made, self.activation)
            )
        if self.norm is not None:
            states = rms_norm(states, self.norm)
        return _linear(states, self.out, self.bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = x @ weight.to(x.device, torch.float32).T
    return made if bias is None else made + bias.to(x.device, torch.float32)


def read_score_head(
    model_dir: Path, decoder: Decoder, *, has_classifiers: bool = False
) -> ClassifierHead | None:
    """Returns the head, fp32 in the host's memory; None for a model that has none, unless adapters
    need a part of it. Raises UnsupportedModel for a head that is missing, has another shape, or has
    too many labels."""
    encoder, num_labels, size = decoder.encoder, len(decoder.labels), decoder.hidden_size
    if not (decoder.labels or (encoder is not None and has_classifiers)):
        return None
    if num_labels > MAX_LABELS:
        raise UnsupportedModel(
            f"{model_dir}: a classifier of {num_labels} labels: at most {MAX_LABELS} are served"
        )
    found = {each.name: each for each in text_tensors(model_dir, decoder.wrapper)}

    def read(name: str, *shape: int) -> Tensor:
        if name not in found:
            raise UnsupportedModel(f"{model_dir}: a classifier needs {name}")
        if found[name].shape != shape:
            raise UnsupportedModel(
                f"{model_dir}: {name} has shape {list(found[name].shape)}, but config.json says "
                f"{list(shape)}"
            )
        with opened(found[name], reads_parts=False) as stored:
            return stored[...].to(torch.float32)

    if encoder is None:
        bias = None
        if decoder.labels_tokens:
            bias = read(f"{SCORE}.bias", num_labels)
        elif f"{SCORE}.bias" in found:
            raise UnsupportedModel(f"{model_dir}: a classifier needs {SCORE}.weight, and no bias")
        return ClassifierHead(read(f"{SCORE}.weight", num_labels, size), bias)
    if encoder.head is None:
        reason = f"{decoder.architecture} has no head that adapters may have, too"
        raise UnsupportedModel(f"--classifiers: {reason}")
    own, head = encoder.head, ClassifierHead()
    if own.dense and (decoder.labels or not own.is_adapters):
        head = ClassifierHead(
            dense=read(f"{own.dense}.weight", size, size),
            dense_bias=read(f"{own.dense}.bias", size) if own.has_dense_bias else None,
            activation=own.activation,
            norm=None if own.norm is None else _read_norm(own.norm, read),
        )
    if decoder.labels:
        weight, bias = (
            read(f"{own.out}.weight", num_labels, size),
            read(f"{own.out}.bias", num_labels),
        )
        head = head._replace(out=weight, bias=bias)
    return head


def _read_norm(norm: Norm, read: Callable[..., Tensor]) -> NormWeight:
    bias = read(f"{norm.module}.bias", norm.size) if norm.has_bias else None
    weight = read(f"{norm.module}.weight", norm.size)
    return NormWeight(weight, norm.eps, norm.kind is NormKind.LAYER, bias=bias)


def read_score_activation(model_dir: Path) -> tuple[DenseActivation, str]:
    """Returns what makes a score of a cross-encoder's output, by the config that
    sentence-transformers saves; and why there are no scores, or ""."""
    path = model_dir / CONFIG
    config: Mapping[str, Any] = read_json(path) if path.exists() else {}
    saved = config.get("sentence_transformers")
    named = {
        "sentence_transformers.activation_fn": (
            saved.get("activation_fn") if isinstance(saved, Mapping) else None
        ),
        _OLDER: config.get(_OLDER),
    }
    for key, name in named.items():
        if name is not None:
            try:
                return read_named(name, f"{CONFIG}: {key}"), ""
            except UnsupportedModel as error:
                return DenseActivation.SIGMOID, str(error)
    return DenseActivation.SIGMOID, ""


def read_activation(model_dir: Path) -> classifier_rule.Activation | None:
    """Returns what the config says makes probabilities; None: the number of outputs decides. Raises
    UnsupportedModel."""
    path = model_dir / CONFIG
    config: Mapping[str, Any] = read_json(path) if path.exists() else {}
    problem = config.get("problem_type")
    if problem is None:
        return None
    if problem not in _BY_PROBLEM:
        raise UnsupportedModel(f"{CONFIG}: problem_type = {problem!r}: one of {list(_BY_PROBLEM)}")
    return _BY_PROBLEM[problem]
