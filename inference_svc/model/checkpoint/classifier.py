"""The head of a model that classifies, and what makes probabilities of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import CONFIG, read_json
from inference_svc.model.checkpoint.tensors import opened, text_tensors
from inference_svc.model.description import SCORE, Decoder
from inference_svc.results.classifier_rule import MAX_LABELS, Activation

_BY_PROBLEM = {
    "regression": Activation.NONE,
    "single_label_classification": None,
    "multi_label_classification": Activation.SIGMOID,
}


class ClassifierHead(NamedTuple):
    """A classifier's head: out(x), or out(tanh(dense(x))), each a weight [out, in] and perhaps a
    bias [out], of a float dtype. Without an `out` it has no outputs, and waits for an adapter's."""

    out: Tensor | None = None
    bias: Tensor | None = None
    dense: Tensor | None = None
    dense_bias: Tensor | None = None

    def with_own(self, own: ClassifierHead) -> ClassifierHead:
        """Returns the head of an adapter that has its own `out`, and perhaps its own `dense`."""
        if own.dense is None:
            return own._replace(dense=self.dense, dense_bias=self.dense_bias)
        return own

    def __call__(self, states: Tensor) -> Tensor | None:
        """Returns the outputs, fp32 [N, labels], for hidden states, fp32 [N, hidden_size]; None if
        there are none."""
        if self.out is None:
            return None
        if self.dense is not None:
            states = torch.tanh(_linear(states, self.dense, self.dense_bias))
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
        if f"{SCORE}.bias" in found:
            raise UnsupportedModel(f"{model_dir}: a classifier needs {SCORE}.weight, and no bias")
        return ClassifierHead(read(f"{SCORE}.weight", num_labels, size))
    if encoder.head is None:
        reason = f"{decoder.architecture} has no head that adapters may have, too"
        raise UnsupportedModel(f"--classifiers: {reason}")
    head, (dense, out, is_adapters) = ClassifierHead(), encoder.head
    if decoder.labels or not is_adapters:
        head = head._replace(
            dense=read(f"{dense}.weight", size, size), dense_bias=read(f"{dense}.bias", size)
        )
    if decoder.labels:
        head = head._replace(
            out=read(f"{out}.weight", num_labels, size), bias=read(f"{out}.bias", num_labels)
        )
    return head


def read_activation(model_dir: Path) -> Activation | None:
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
