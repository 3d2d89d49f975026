"""The names that PEFT gives to an adapter's tensors, and the canonical target names behind them.

    base_model.model.<module>.lora_A.weight            [rank, in]
    base_model.model.<module>.lora_B.weight            [out, rank]
    base_model.model.<module>.lora_embedding_A         [rank, vocab]
    base_model.model.<module>.lora_embedding_B         [hidden, rank]

`<module>` is the module's path in the model that was trained, "model.layers.0.self_attn.q_proj";
the config's patterns speak of it. Saved from a whole state dict, the adapter's own name is in
between: `lora_A.<name>.weight`. Adapted twice, the prefix is there twice. A model with more than
text has its language model inside: `language_model.model.layers.0` (older transformers),
`model.language_model.layers.0` (newer); the target is the path in the language model alone.

Source: peft/utils/save_and_load.py `get_peft_model_state_dict` of PEFT 0.21.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from adapter_store.core import SegmentKind, TargetKind
from adapter_store.errors import InvalidAdapter

PREFIX = "base_model.model."
DEFAULT_ADAPTER_NAME = "default"

_NAMED = r"(?:\.(?P<adapter>[^.]{1,128}))?"
_LINEAR = re.compile(rf"(?P<module>.+)\.lora_(?P<side>[AB]){_NAMED}\.weight")
_EMBEDDING = re.compile(rf"(?P<module>.+)\.lora_embedding_(?P<side>[AB]){_NAMED}")
_MODULE = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_WRAPPED = re.compile(r"(?:model\.)?language_model\.(?P<inner>.+)")

_BASE_WEIGHT = "a base weight: save with save_embedding_layers=False"

# What people do save beside A and B, and what to do about it.
_HINTS = (
    (".base_layer.", _BASE_WEIGHT),
    (".embed_tokens.weight.", _BASE_WEIGHT),
    (".lm_head.weight.", _BASE_WEIGHT),
    (".lora_magnitude_vector", "DoRA is not supported"),
    (".modules_to_save.", "modules_to_save is not supported"),
    (".lora_B.bias", "lora_bias is not supported"),
    (".bias", "a bias of the base model is not supported"),
)


@dataclass(frozen=True, slots=True)
class TensorKey:
    """What a tensor is: side A or B of `target`, which the trained model calls `module`."""

    target: str
    module: str
    kind: TargetKind
    side: SegmentKind
    adapter_name: str


def parse_key(key: str) -> TensorKey:
    """The meaning of a tensor's name.

    Raises InvalidAdapter TENSOR_UNKNOWN (subject: the name): the tensor would stay unused.
    """
    path = key.removeprefix(PREFIX)
    for pattern, kind in ((_LINEAR, TargetKind.LINEAR), (_EMBEDDING, TargetKind.EMBEDDING)):
        match = pattern.fullmatch(path.removeprefix(PREFIX))
        if match and path != key and _MODULE.fullmatch(match["module"]):
            side = SegmentKind.A if match["side"] == "A" else SegmentKind.B
            name = match["adapter"] or DEFAULT_ADAPTER_NAME
            return TensorKey(target_of(match["module"]), match["module"], kind, side, name)
    hint = next((hint for part, hint in _HINTS if part in f"{key}."), "")
    if not hint and path == key:
        hint = f"it does not start with {PREFIX}"
    raise InvalidAdapter(
        f"{key}: not a LoRA weight of a module" + (f" ({hint})" if hint else ""),
        subject=key,
        reason="TENSOR_UNKNOWN",
    )


def target_of(module: str) -> str:
    """The canonical target: the module's path in the language model alone."""
    wrapped = _WRAPPED.fullmatch(module)
    if wrapped is None:
        return module
    inner = wrapped["inner"]
    return inner if inner.startswith(("model.", "lm_head")) else f"model.{inner}"
