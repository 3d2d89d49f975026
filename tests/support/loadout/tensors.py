"""Names of an adapter's tensors, and its config, as clients push them."""

from __future__ import annotations

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"
CONFIG = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
