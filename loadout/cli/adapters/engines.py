"""Known differences of other engines in applying adapters, each with its source.

We read these releases and ran their loaders on adapters that PEFT 0.21 saved. We did not run
their servers.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass


class Engine(enum.StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"


ENGINES: Mapping[Engine, str] = {Engine.VLLM: "vLLM 0.33.0", Engine.SGLANG: "SGLang 0.5.23"}
"""The engines, with the releases that were read."""


class Does(enum.StrEnum):
    """The treatment of a feature. A caller learns nothing of one that is dropped, or computed
    otherwise."""

    DROPS = "drops it"
    CHANGES = "computes it differently"
    FAILS = "accepts it, and fails at the first request"
    REFUSES = "refuses it"
    REFUSES_FOR_SOME = "refuses it for some models"


@dataclass(frozen=True, slots=True)
class Note:
    """An engine's treatment of a feature: a value of adapter_store.checkpoint.features.Feature."""

    engine: Engine
    feature: str
    does: Does
    what: str
    source: str

    @property
    def where(self) -> str:
        """The source with its full path."""
        return _FOLDERS[self.engine] + self.source


_FOLDERS: Mapping[Engine, str] = {Engine.VLLM: "vllm/lora/", Engine.SGLANG: "sglang/srt/lora/"}
_V, _S = Engine.VLLM, Engine.SGLANG
NOTES = (
    Note(
        _V,
        "rank_pattern",
        Does.CHANGES,
        "before 0.32 every module has the scale of the config's single rank",
        "peft_helper.py, get_rank_and_scaling",
    ),
    Note(
        _V,
        "alpha_pattern",
        Does.CHANGES,
        "before 0.32 every module has the scale of the config's single alpha",
        "peft_helper.py, get_rank_and_scaling",
    ),
    Note(
        _V,
        "embedding",
        Does.REFUSES_FOR_SOME,
        "models without `embedding_modules`, such as Qwen2, Gemma and Mistral",
        "lora_model.py, check_unexpected_modules; vllm-project/vllm#48934",
    ),
    Note(
        _V,
        "head",
        Does.REFUSES_FOR_SOME,
        "models without `embedding_modules`, such as Qwen2, Gemma and Mistral",
        "lora_model.py, check_unexpected_modules; vllm-project/vllm#48934",
    ),
    Note(
        _V,
        "fused",
        Does.REFUSES_FOR_SOME,
        "models whose checkpoints have separate parts, such as Llama and Qwen",
        "worker_manager.py, _load_adapter",
    ),
    Note(_V, "lora_bias", Does.REFUSES, "before 0.32 it was dropped", "peft_helper.py"),
    Note(_V, "dora", Does.REFUSES, "with a message", "peft_helper.py; vllm-project/vllm#10849"),
    Note(_V, "biases", Does.REFUSES, "by the config", "peft_helper.py, validate_legal"),
    Note(
        _V,
        "norms",
        Does.REFUSES,
        "by `modules_to_save` in the config",
        "peft_helper.py; vllm-project/vllm#9280",
    ),
    Note(
        _V,
        "whole_weights",
        Does.REFUSES,
        "by `modules_to_save` in the config",
        "peft_helper.py; vllm-project/vllm#9280",
    ),
    Note(
        _V,
        "saved_along",
        Does.DROPS,
        "`base_layer.weight`, equal to the base's or not; other copies are refused",
        "utils.py, is_base_embedding_weights; huggingface/peft#2092",
    ),
    Note(
        _V,
        "token_rows",
        Does.REFUSES,
        "as an unsupported weight",
        "utils.py, parse_fine_tuned_lora_name; vllm-project/vllm#36501",
    ),
    Note(
        _V,
        "experts",
        Does.REFUSES_FOR_SOME,
        "models that keep all experts in one tensor; others if an expert lacks a projection",
        "lora_model.py, lora_weights.py; vllm-project/vllm#40005",
    ),
    Note(
        _V,
        "expert_parameters",
        Does.REFUSES_FOR_SOME,
        "models that keep each expert as a module, such as Qwen3-MoE and Mixtral",
        "model_manager.py; vllm-project/vllm#42242",
    ),
    Note(
        _V,
        "alora",
        Does.REFUSES,
        "before 0.32 it applied to every token",
        "peft_helper.py; vllm-project/vllm#19710",
    ),
    Note(_V, "mlx", Does.REFUSES, "it expects PEFT's config", "peft_helper.py, from_dict"),
    Note(_V, "shards", Does.REFUSES, "it finds no tensors in the folder", "lora_model.py"),
    Note(
        _S,
        "rslora",
        Does.CHANGES,
        "the scale is alpha / r, too small by the square root of r",
        "lora.py; sgl-project/sglang#40835",
    ),
    Note(
        _S,
        "rank_pattern",
        Does.FAILS,
        "the buffers have the config's one rank",
        "mem_pool.py, load_lora_weight_to_buffer",
    ),
    Note(_S, "alpha_pattern", Does.CHANGES, "all modules have the scale of one alpha", "lora.py"),
    Note(
        _S,
        "lora_bias",
        Does.DROPS,
        "B's weight takes its place in the buffer",
        "mem_pool.py, load_lora_weight_to_buffer",
    ),
    Note(
        _S,
        "dora",
        Does.REFUSES,
        "with a message",
        "lora_manager.py; sgl-project/sglang#22125",
    ),
    Note(_S, "biases", Does.DROPS, "B's weight takes its place", "mem_pool.py"),
    Note(
        _S,
        "norms",
        Does.DROPS,
        "the last norm; with norms of layers the first request fails",
        "lora.py, _process_weight; mem_pool.py",
    ),
    Note(_S, "whole_weights", Does.DROPS, "the base's are used", "lora.py, _process_weight"),
    Note(_S, "saved_along", Does.DROPS, "the base's are used", "lora.py; mem_pool.py"),
    Note(_S, "token_rows", Does.DROPS, "the base's are used", "lora.py, _process_weight"),
    Note(
        _S,
        "expert_parameters",
        Does.FAILS,
        "no module has the name of its tensors",
        "mem_pool.py; sgl-project/sglang#27381",
    ),
    Note(
        _S,
        "alora",
        Does.CHANGES,
        "it applies to every token",
        "lora_config.py; sgl-project/sglang#16942",
    ),
    Note(_S, "mlx", Does.REFUSES, "it expects PEFT's config", "lora_config.py"),
)


def notes_on(features: Collection[str], engine: Engine) -> list[Note]:
    """Returns the known facts about the engine and an adapter with these features."""
    return [note for note in NOTES if note.engine is engine and note.feature in features]
