"""The head of a model that classifies, and what makes probabilities of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import CONFIG, read_json
from inference_svc.model.checkpoint.tensors import opened, text_tensors
from inference_svc.model.description import SCORE, Decoder
from inference_svc.results.classifier_rule import Activation

_BY_PROBLEM = {
    "regression": Activation.NONE,
    "single_label_classification": None,
    "multi_label_classification": Activation.SIGMOID,
}


def read_score_head(model_dir: Path, decoder: Decoder) -> Tensor | None:
    """Returns the head, fp32 [labels, hidden_size] in the host's memory; None for a model that has
    none. Raises UnsupportedModel for a head that is missing, or has another shape."""
    if not decoder.labels:
        return None
    name, shape = f"{SCORE}.weight", (len(decoder.labels), decoder.hidden_size)
    found = {each.name: each for each in text_tensors(model_dir, decoder.wrapper)}
    if name not in found or f"{SCORE}.bias" in found:
        raise UnsupportedModel(f"{model_dir}: a classifier needs {name}, and no bias")
    if found[name].shape != shape:
        raise UnsupportedModel(
            f"{model_dir}: {name} has shape {list(found[name].shape)}, but config.json says "
            f"{list(shape)}"
        )
    with opened(found[name], reads_parts=False) as stored:
        return stored[...].to(torch.float32)


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
