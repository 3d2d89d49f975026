"""A verdict on every file next to an adapter's config and weights.

A file that may hold weights is part of the adapter, known to change nothing, or refused by name. A
trainer that writes `new_embeddings.safetensors` expects it to be applied. Files that cannot hold
weights pass, except for a few settings that tell how to read weights.

The store checks every folder that it gets. The client checks a folder before it uploads it, because
files that an upload leaves out would be lost without notice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

WEIGHT_SUFFIXES = (
    *("safetensors", "bin", "pt", "pth", "ckpt", "pkl", "pickle", "npz", "npy"),
    *("gguf", "ggml", "h5", "msgpack", "onnx", "safetensors.index.json", "bin.index.json"),
)
"""Suffixes of files that may hold weights, or that tell where weights are."""

HARMLESS: Mapping[str, str] = {
    r"training_args\.bin": "the trainer's settings",
    r"optimizer(_\d+)?\.(pt|bin)": "state of the optimizer",
    r"scheduler(_\d+)?\.(pt|bin)": "state of the learning rate's schedule",
    r"(grad_)?scaler\.(pt|bin)": "state of the loss scaler",
    r"(sampler|dl_state_dict)(_\d+)?\.bin": "where the training data was",
    r"rng_state(_\d+)?\.pth": "state of random numbers",
    r"(random_states|custom_checkpoint)_\d+\.pkl": "Accelerate's state of a training run",
    r"pytorch_model_fsdp(_\d+)?\.bin": "FSDP's state of the same weights, to resume training from",
    r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt": "DeepSpeed's state",
    r"mp_rank_\d+_model_states\.pt": "DeepSpeed's state of the same weights",
    r"(recipe|training|trainer)_state\.pt": "torchtune's state of a training run",
    r"tokenizer\.(pkl|bin)": "a tokenizer in a form that is not read",
    r"adapter_model.*\.(bin|pt|pth|pkl|ckpt)": "the same adapter, pickled",
    r"adapter_model.*\.bin\.index\.json": "the same adapter, pickled",
}
"""Files with suffixes of weights, and why each does not change the result."""

REFUSED: Mapping[str, str] = {
    r"new_embeddings\.safetensors": "rows of added tokens, which are not supported",
    r"(value_head|v_head)\..*": "the head of a reward model, whose scores are not served",
    r"non_lora_trainables\.bin": "model weights that were trained together with the adapter",
    r"modelopt_state.*": "ModelOpt's state of a quantised model",
    r"(hf_)?(quant|quantize|quantization)_config\.json": "settings of quantised weights",
    r"(\d+_)?adapters\.npz": "MLX-LM's weights before it wrote safetensors",
}
"""Files that would change the result, and their content. Other weights are refused too."""

MLX_HARMLESS: Mapping[str, str] = {
    r"\d+_adapters\.safetensors": "MLX-LM's weights of an earlier step",
}
"""Files that are harmless only next to MLX-LM's `adapters.safetensors`."""

TORCHTUNE_HARMLESS: Mapping[str, str] = {
    r"(model|pytorch_model|ft-model|hf_model_\d+_\d+)([-_]\d+-of-\d+)?"
    r"\.(safetensors|bin)(\.index\.json)?": "the base model with the adapter merged in",
}
"""Files that are harmless only next to torchtune's `adapter_model.pt`, because torchtune saves the
whole model as well by default."""

TORCHTUNE_FILE = "adapter_model.pt"

_WEIGHTS = re.compile(rf".*\.({'|'.join(map(re.escape, WEIGHT_SUFFIXES))})", re.I | re.S)


class UnusedFile(NamedTuple):
    """A file that would have to be applied but is not; `what` describes its content."""

    name: str
    what: str


def find_unused(names: Collection[str], *, is_mlx: bool) -> UnusedFile | None:
    """Finds a file that would have to be applied but is not part of the adapter.

    Args:
        names: Names of the files next to the adapter's own.
        is_mlx: Whether MLX-LM wrote the adapter.

    Returns:
        The first such file by name, or None.
    """
    harmless = [*HARMLESS]
    if is_mlx:
        harmless += MLX_HARMLESS
    elif TORCHTUNE_FILE in names:
        harmless += TORCHTUNE_HARMLESS
    passes = re.compile("|".join(f"(?:{pattern})" for pattern in harmless))
    for name in sorted(names):
        if passes.fullmatch(name):
            continue
        what = next((what for each, what in REFUSED.items() if re.fullmatch(each, name)), "")
        if what or _WEIGHTS.fullmatch(name):
            return UnusedFile(name, what or "weights that are no part of the adapter")
    return None
