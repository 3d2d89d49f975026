"""A verdict on every file that lies beside an adapter's config and weights.

A file that may hold weights is part of the adapter, known to change nothing, or refused by name: a
trainer that writes `new_embeddings.safetensors` means it to be applied. What cannot hold weights
passes, but for a few settings that say how weights are to be read.

The client has the same tables, so that it sends no folder of which the store would not be told
everything (`loadout/upload.py`; a test compares them).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from adapter_store.checkpoint.json import show
from adapter_store.errors import InvalidAdapter

WEIGHT_SUFFIXES = (
    *("safetensors", "bin", "pt", "pth", "ckpt", "pkl", "pickle", "npz", "npy"),
    *("gguf", "ggml", "h5", "msgpack", "onnx", "safetensors.index.json", "bin.index.json"),
)
"""How names of files end that may hold weights, or tell where they lie."""

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
"""Files whose names end as weights' do, and why each changes nothing that is computed."""

REFUSED: Mapping[str, str] = {
    r"new_embeddings\.safetensors": "rows of added tokens, which are not supported",
    r"(value_head|v_head)\..*": "the head of a reward model, whose scores are not served",
    r"non_lora_trainables\.bin": "weights of the model that were trained beside the adapter",
    r"modelopt_state.*": "ModelOpt's state of a quantised model",
    r"(hf_)?(quant|quantize|quantization)_config\.json": "how weights of this folder are quantised",
    r"(\d+_)?adapters\.npz": "MLX-LM's weights before it wrote safetensors",
}
"""Files that would change what is computed, and what each is. Other weights are refused, too."""

MLX_HARMLESS: Mapping[str, str] = {
    r"\d+_adapters\.safetensors": "MLX-LM's weights of an earlier step",
}
"""What is harmless beside MLX-LM's `adapters.safetensors` only."""

TORCHTUNE_HARMLESS: Mapping[str, str] = {
    r"(model|pytorch_model|ft-model|hf_model_\d+_\d+)([-_]\d+-of-\d+)?"
    r"\.(safetensors|bin)(\.index\.json)?": "the base model with the adapter merged in",
}
"""What is harmless beside torchtune's own `adapter_model.pt` only: it saves the whole model along
by default."""

TORCHTUNE_FILE = "adapter_model.pt"

_WEIGHTS = re.compile(rf".*\.({'|'.join(map(re.escape, WEIGHT_SUFFIXES))})", re.I | re.S)


def check_side_files(names: Collection[str], *, is_mlx: bool) -> None:
    """Checks the names of the files in a folder that are not the adapter's own.

    Raises InvalidAdapter FILE_UNUSED, with the file as its subject.
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
            shown = name if name.isprintable() and len(name) <= 128 else show(name)
            raise InvalidAdapter(
                f"{shown}: {what or 'weights that are no part of the adapter'}: nothing would "
                "apply it. If the adapter is whole without it, register a folder that does not "
                "have it",
                subject=shown,
                reason="FILE_UNUSED",
            )
