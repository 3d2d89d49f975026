"""The names that PEFT gives to an adapter's tensors, and the canonical target names behind them.

    base_model.model.<target>.lora_A.weight            [rank, in]
    base_model.model.<target>.lora_B.weight            [out, rank]
    base_model.model.<target>.lora_embedding_A         [rank, vocab]
    base_model.model.<target>.lora_embedding_B         [hidden, rank]

An adapter called "default" may be named too: `lora_A.default.weight`. `<target>` is the module's
path in the base model, "model.layers.0.self_attn.q_proj".
Source: peft/utils/save_and_load.py `get_peft_model_state_dict` of PEFT 0.21.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from adapter_store.core import SegmentKind, TargetKind
from adapter_store.errors import InvalidAdapter

PREFIX = "base_model.model."

_LINEAR = re.compile(r"(?P<target>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_EMBEDDING = re.compile(r"(?P<target>.+)\.lora_embedding_(?P<side>[AB])(\.default)?")
_TARGET = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")

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
    """What a tensor is: side A or B of a target of this kind."""

    target: str
    kind: TargetKind
    side: SegmentKind


def parse_key(key: str) -> TensorKey:
    """The meaning of a tensor's name.

    Raises InvalidAdapter TENSOR_UNKNOWN (subject: the name): the tensor would stay unused.
    """
    for pattern, kind in ((_LINEAR, TargetKind.LINEAR), (_EMBEDDING, TargetKind.EMBEDDING)):
        match = pattern.fullmatch(key.removeprefix(PREFIX))
        if match and key.startswith(PREFIX) and _TARGET.fullmatch(match["target"]):
            side = SegmentKind.A if match["side"] == "A" else SegmentKind.B
            return TensorKey(match["target"], kind, side)
    hint = next((hint for part, hint in _HINTS if part in f"{key}."), "")
    if not hint and not key.startswith(PREFIX):
        hint = f"it does not start with {PREFIX}"
    raise InvalidAdapter(
        f"{key}: not a LoRA weight of a module" + (f" ({hint})" if hint else ""),
        subject=key,
        reason="TENSOR_UNKNOWN",
    )
