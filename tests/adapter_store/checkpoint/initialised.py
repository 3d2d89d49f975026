"""Adapters that PEFT trains on a changed base, and their folders: initial, trained, and as PEFT
converts them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
IDS = torch.arange(24).reshape(2, 12)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


def save_model(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Saves a small random model, whose singular values are so far apart that float32 tells them
    apart, as it does most of a trained model's; `max_shard_size` splits it."""
    torch.manual_seed(7)
    size = options.pop("max_shard_size", "1GB")
    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, **options)
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() == 2:
            u, values, vt = torch.linalg.svd(weight.data, full_matrices=False)
            weight.data = (u * 2 * 0.9 ** torch.arange(len(values))) @ vt
    model.to(dtype).save_pretrained(folder, max_shard_size=size)
    return folder


def load_model(folder: Path, dtype: torch.dtype | str = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def quantise(weight: torch.Tensor) -> torch.Tensor:
    """Rounds each row to 15 values, as 4 bits do."""
    step = weight.abs().amax(1, keepdim=True) / 7
    return (weight / step).round() * step


def begin_with_loftq(adapted: Any) -> None:
    """Does what PEFT's `loftq_init` does, which needs a GPU and bitsandbytes."""
    for module in adapted.modules():
        if not hasattr(module, "lora_A") or "default" not in module.lora_A:
            continue
        weight = module.base_layer.weight.data
        low_rank = torch.zeros_like(weight)
        for _ in range(2):
            quantised = quantise(weight - low_rank)
            u, values, vt = torch.linalg.svd(weight - quantised, full_matrices=False)
            roots, rank = values.sqrt(), module.r["default"]
            b, a = (u * roots)[:, :rank], (roots[:, None] * vt)[:rank]
            low_rank = b @ a
        module.lora_A["default"].weight.data, module.lora_B["default"].weight.data = a, b
        module.base_layer.weight.data = quantised


def begin(base: Any, config: LoraConfig) -> Any:
    """Returns the model as PEFT prepares it for training."""
    init = config.init_lora_weights
    with quiet():
        if init == "corda":
            preprocess_corda(base, config, run_model=lambda: run_on_data(base))
        if init == "lora_ga":
            preprocess_loraga(base, config, train_step=lambda: run_on_data(base).sum().backward())
        adapted = get_peft_model(base, config)
    if config.loftq_config:
        begin_with_loftq(adapted)
    return adapted


def run_on_data(base: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return base(torch.randint(0, 48, (1, 1024))).logits.square()


CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "corda": lambda: {"corda_config": CordaConfig(corda_method="ipm")},
    "lora_ga": lambda: {"lora_ga_config": LoraGAConfig()},
}


@dataclass
class Trained:
    """A trained adapter: what it computes, and its folders. `converted` is PEFT's conversion, None
    where PEFT refuses it."""

    model: Path
    initial: Path
    trained: Path
    converted: Path | None
    logits: torch.Tensor
    adapted: Any


def train(folder: Path, model: Path, init: str, *, step: float = 0.05, **options: Any) -> Trained:
    """Trains for a moment: A and B move by `step` of their size. Saves as PEFT's documentation
    says, but for init_lora_weights of the trained adapter, which stays."""
    torch.manual_seed(11)
    fields = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | options
    base = load_model(model)
    begins_with = True if init == "loftq" else init
    with quiet():
        config = LoraConfig(init_lora_weights=begins_with, **fields, **CONFIGS.get(init, dict)())
    if init == "loftq":  # given to the constructor it needs bitsandbytes
        config.loftq_config = {"loftq_bits": 4, "loftq_iter": 2}
    adapted = begin(base, config).eval()
    converted: Path | None = folder / "converted"
    with quiet():
        config.init_lora_weights = True
        adapted.save_pretrained(str(folder / "initial"))
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_" in name:
                    weight += step * weight.std() * torch.randn_like(weight)
        try:
            initial = str(folder / "initial")
            adapted.save_pretrained(
                str(converted), path_initial_model_for_weight_conversion=initial
            )
        except ValueError:  # rank-stabilised, with patterns
            converted = None
        config.init_lora_weights = init
        adapted.save_pretrained(str(folder / "trained"))
    with torch.no_grad():
        logits = adapted(IDS).logits
    return Trained(model, folder / "initial", folder / "trained", converted, logits, adapted)


def load(model: Path, adapter: Path, dtype: torch.dtype | str = "auto") -> Any:
    """Loads an adapter on the original base, as PEFT does."""
    with quiet():
        return PeftModel.from_pretrained(load_model(model, dtype), str(adapter)).eval()


@torch.no_grad()
def changes(adapted: Any) -> dict[str, torch.Tensor]:
    """Returns what each adapted module adds to its weight, in float64."""
    adapted = copy.deepcopy(adapted).double()
    return {
        name: module.get_delta_weight("default")
        for name, module in adapted.named_modules()
        if hasattr(module, "get_delta_weight")
    }
