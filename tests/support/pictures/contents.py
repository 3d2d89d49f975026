"""Adapters of towers and connectors with contents besides A and B."""

from __future__ import annotations

from tests.support.models.zoo import AdapterSpec
from tests.support.pictures.models import CONNECTOR, GEMMA4_TOWER, TOWER

_GEMMA4_NORMS = (
    "vision_tower.encoder.layers.0.self_attn.q_norm",
    "vision_tower.encoder.layers.1.self_attn.k_norm",
    "vision_tower.encoder.layers.1.post_feedforward_layernorm",
)
"""The text's have the same names in their layers."""
_BOTH = f"{TOWER}|{CONNECTOR}"


def _saving(name: str, *modules: str) -> AdapterSpec:
    return AdapterSpec(name, 4, TOWER, {"modules_to_save": list(modules)})


FURTHER = {
    "magnitudes": (
        AdapterSpec("of-dora", 4, _BOTH, {"use_dora": True}),
        AdapterSpec("of-biases", 4, _BOTH, {"lora_bias": True}),
    ),
    "base-biases": (AdapterSpec("of-base-biases", 4, _BOTH, {"bias": "lora_only"}),),
    "norms": (_saving("of-norms", "norm1", "post_layernorm"),),
    "norms-of-gemma": (_saving("of-norms", "norm1", "post_layernorm", "mm_soft_emb_norm"),),
    "of-gemma4": (AdapterSpec("of-dora", 4, f"{GEMMA4_TOWER}|{CONNECTOR}", {"use_dora": True}),),
    "norms-of-gemma4": (
        AdapterSpec("of-norms", 4, GEMMA4_TOWER, {"modules_to_save": list(_GEMMA4_NORMS)}),
    ),
    "whole-embedder": (
        AdapterSpec("of-saved", 4, GEMMA4_TOWER, {"modules_to_save": ["embedding_projection"]}),
    ),
    "norms-of-mistral": (_saving("of-norms", "attention_norm", "ln_pre", "projector.norm"),),
    "norms-of-qwen2.5": (_saving("of-norms", "norm1", "merger.ln_q"),),
    "norms-of-qwen3": (_saving("of-norms", "norm1", "merger.norm", "merger_list.1.norm"),),
    "whole-projector": (_saving("of-saved", "multi_modal_projector"),),
    "whole-projection": (_saving("of-saved", "modality_projection"),),
    "whole-merger": (_saving("of-saved", "visual.merger"),),
    "whole-taps": (_saving("of-saved", "visual.merger", "merger_list.0", "merger_list.1"),),
}
"""Adapters by the kind of their contents: PEFT can have the ones of a kind in one model."""
