"""The benchmark's model and adapters: real shapes, random weights, made where they are needed."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "bench-200m"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_model(folder: Path) -> None:
    """bench-200m: Llama architecture, bf16, 197 M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_adapter(model_dir: Path, folder: Path, seed: int, rank: int = 16) -> None:
    """A PEFT adapter over all seven projections, alpha 2 * rank, bf16 files."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=TARGETS, base_model_name_or_path=NAME
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(model_dir))
        inject_adapter_in_model(config, model)
    state = get_peft_model_state_dict(model)
    tensors = {
        f"base_model.model.{name}": (torch.randn(value.shape) * 0.02).to(torch.bfloat16)
        for name, value in state.items()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config.inference_mode = True
    config.save_pretrained(folder)


def prompts(count: int, length: int, vocab: int = 8192) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocab, (count, length), generator=generator).tolist()
