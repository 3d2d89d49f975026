"""Random encoders with PEFT adapters: on disk as we serve them, in memory as the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import torch
import transformers

from inference_svc.results.embedding_rule import Pooling
from tests.support.models.zoo import (
    VOCAB,
    Zoo,
    quiet,
    save_tokenizer,
    shake_norms_and_biases,
)
from tests.support.store.cards import copied_cards

MAX_TOKENS = 140
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.1,
    "pad_token_id": 1,
}
_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"pad_token_id": 0}),
    "roberta": ("Roberta", {"max_position_embeddings": MAX_TOKENS + 2, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"max_position_embeddings": MAX_TOKENS + 2}),
    "modernbert": (
        "ModernBert",
        {
            "global_attn_every_n_layers": 2,
            "local_attention": 16,
            "norm_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
        }
        | _TOKENS,
    ),
    "modernbert-plain": ("ModernBert", {"local_attention": 24} | _TOKENS),
}
ALL = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
ADAPTERS = {"heads": (8, ["query", "value"]), "every": (16, ALL), "wide": (4, ["dense"])}
NAMES = {"query": "Wqkv", "value": "attn.Wo", "dense": "Wo"}
"""Targets of ModernBERT in the place of these; it has `ALL_MODERN` in the place of all."""
ALL_MODERN = ["Wqkv", "Wi", "Wo"]
"""Ranks and targets: "dense" names three modules of a layer. PEFT takes parts of a module's name
for an adapter's, so that none of these is such a part."""
LAYERS_ALONE = {"layers_to_transform": [0, 2]}
"""PEFT finds no layers in names that begin with them, as ModernBERT's do."""


class Encoder(NamedTuple):
    """A model on disk, its oracle with PEFT's adapters, and their folders."""

    folder: Path
    reference: Any
    adapter_dirs: dict[str, Path]

    def hidden(self, adapter: str, ids: Sequence[int]) -> np.ndarray:
        """Returns the last hidden states, [tokens, hidden_size]."""
        model, inputs = self.reference, torch.tensor([list(ids)])
        with torch.no_grad():
            if adapter:
                model.set_adapter(adapter)
                found = model(inputs).last_hidden_state
            else:
                with model.disable_adapter():
                    found = model(inputs).last_hidden_state
        return np.asarray(found[0].float().numpy())

    def vector(self, adapter: str, ids: Sequence[int], pooling: Pooling) -> np.ndarray:
        first, end = pooling.positions(len(ids))
        chosen = self.hidden(adapter, ids)[first:end]
        vector = chosen if pooling is Pooling.NONE else chosen.mean(0)
        return np.asarray(vector / np.linalg.norm(vector, axis=-1, keepdims=True))

    @property
    def zoo(self) -> Zoo:
        return Zoo("encoder", self.folder, self.reference, self.adapter_dirs)


def make_encoder(family: str, folder: Path, **changes: Any) -> Encoder:
    """Returns a random encoder without a pooler, and adapters of it, as PEFT saves them."""
    model = save_encoder(family, folder / "model", "Model", **changes)
    reference: Any = model
    for name, (rank, targets) in ADAPTERS.items():
        config = peft.LoraConfig(
            task_type="FEATURE_EXTRACTION",
            r=rank,
            target_modules=_targets(family, targets),
            init_lora_weights=False,
            use_rslora=name == "every",
            **(LAYERS_ALONE if name == "heads" and "modern" not in family else {}),
        )
        with quiet():
            if reference is model:
                reference = peft.get_peft_model(model, config, name)
            else:
                reference.add_adapter(name, config)
    with quiet(), copied_cards():
        reference.save_pretrained(folder / "adapters", save_embedding_layers=False)
    dirs = {name: folder / "adapters" / name for name in ADAPTERS}
    return Encoder(folder / "model", reference.eval(), dirs)


def _targets(family: str, targets: list[str]) -> list[str]:
    if not family.startswith("modernbert"):
        return targets
    return ALL_MODERN if targets is ALL else [NAMES[each] for each in targets]


def config_of(family: str, **changes: Any) -> Any:
    prefix, options = FAMILIES[family]
    return getattr(transformers, f"{prefix}Config")(**(_SHAPE | options | changes))


def save_encoder(family: str, folder: Path, end: str, **changes: Any) -> Any:
    """Returns a random model of the class with this end, which is saved with a tokenizer."""
    prefix, _ = FAMILIES[family]
    torch.manual_seed(11)
    config = config_of(family, **changes)
    has_pooler = end == "Model" and prefix != "ModernBert"
    extra = {"add_pooling_layer": False} if has_pooler else {}
    model = getattr(transformers, f"{prefix}{end}")(config, **extra).eval()
    shake_norms_and_biases(model)
    model.name_or_path = model.config.name_or_path = family
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_modules(folder: Path, *, pooling: str, normalises: bool, **prompts: str) -> None:
    """Saves the files of sentence-transformers."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds[: 2 + normalises])
    ]
    (folder / "1_Pooling").mkdir()
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {f"pooling_mode_{pooling}": True}),
        ("config_sentence_transformers.json", {"prompts": prompts}),
    ):
        (folder / name).write_text(json.dumps(content))
