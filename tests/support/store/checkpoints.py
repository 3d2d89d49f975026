"""The files of an adapter, changed, and how the store refuses them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from servicekit.errors import ServiceError

CONFIG = "adapter_config.json"

WEIGHTS = "adapter_model.safetensors"

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"

A, B = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"


def refusal(folder: Path, limits: CheckpointLimits | None = None) -> ServiceError:
    with pytest.raises(ServiceError) as error:
        open_checkpoint(folder, limits)
    assert error.value.subject, "names no culprit"
    return error.value


def pair(**replaced: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = {A: torch.ones(4, 16), B: torch.ones(16, 4), **replaced}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | fields
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / CONFIG).write_text(json.dumps(kept))
