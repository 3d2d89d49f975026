"""The names of the files that sentence-transformers saves beside a model's own. Whoever downloads a
model needs them, and no torch."""

from __future__ import annotations

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
INPUTS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""Names of the file with the limits of inputs, in the order of sentence-transformers."""
POOLING = "1_Pooling/config.json"
"""Where sentence-transformers saves the pooling."""
DENSE = ("[0-9]_Dense/config.json", "[0-9]_Dense/model.safetensors")
"""Patterns of where it saves dense layers."""
