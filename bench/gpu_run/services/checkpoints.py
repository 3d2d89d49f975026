"""Writes a Llama model with random weights, and random adapters, as their authors' tools do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu_run.pack import safetensors

BASE_MODEL = "bench"
NUM_WRITERS = 4
STD = 0.02
END_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Checkpoints:
    """A model of `config`, Llama's, and adapters of `rank` on all of its linear layers."""

    config: dict[str, Any]
    dtype: torch.dtype
    rank: int
    device: torch.device

    @property
    def adapter_bytes(self) -> int:
        """The size of one adapter."""
        sizes = sum(sum(shape) for shape in self._linears().values())
        return self.config["num_hidden_layers"] * self.rank * sizes * self.dtype.itemsize

    @property
    def model_bytes(self) -> int:
        config, linears = self.config, self._linears().values()
        layers = config["num_hidden_layers"] * sum(rows * size for rows, size in linears)
        tables = 2 * config["vocab_size"] * config["hidden_size"]
        return int((layers + tables) * self.dtype.itemsize)

    def write_model(self, folder: Path) -> None:
        """Writes a file for each layer, several at once, and one for the rest."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config | END_TOKENS))
        places: dict[str, str] = {}

        def write(layer: int) -> None:
            tensors = dict(self._layer(layer) if layer >= 0 else self._rest())
            name = f"model-{layer + 1:05d}.safetensors"
            safetensors.save(folder / name, tensors)
            places.update(dict.fromkeys(tensors, name))

        with ThreadPoolExecutor(NUM_WRITERS) as threads:
            list(threads.map(write, range(-1, self.config["num_hidden_layers"])))
        index = {"metadata": {"total_size": self.model_bytes}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def write_adapter(self, folder: Path) -> None:
        """Writes an adapter that differs from all others."""
        folder.mkdir(parents=True)
        tensors = {}
        for layer in range(self.config["num_hidden_layers"]):
            for module, (rows, size) in self._linears().items():
                name = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{name}.lora_A.weight"] = self._random(self.rank, size, size**-0.5)
                tensors[f"{name}.lora_B.weight"] = self._random(rows, self.rank, STD / 2)
        safetensors.save(folder / "adapter_model.safetensors", tensors)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": BASE_MODEL,
            "r": self.rank,
            "lora_alpha": self.rank,
            "target_modules": [module.rpartition(".")[2] for module in self._linears()],
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "modules_to_save": None,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def _linears(self) -> dict[str, tuple[int, int]]:
        """Returns the rows and columns of a layer's linear layers by module."""
        config = self.config
        hidden, wide = config["hidden_size"], config["intermediate_size"]
        head = hidden // config["num_attention_heads"]
        keys = head * config["num_key_value_heads"]
        return {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }

    def _layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        prefix = f"model.layers.{layer}"
        for module, (rows, size) in self._linears().items():
            yield f"{prefix}.{module}.weight", self._random(rows, size, STD)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", self._ones()

    def _rest(self) -> Iterator[tuple[str, Tensor]]:
        config = self.config
        for name in ("model.embed_tokens", "lm_head"):
            yield f"{name}.weight", self._random(config["vocab_size"], config["hidden_size"], STD)
        yield "model.norm.weight", self._ones()

    def _random(self, rows: int, size: int, std: float) -> Tensor:
        made = torch.empty(rows, size, dtype=self.dtype, device=self.device)
        return made.normal_(std=std).cpu()

    def _ones(self) -> Tensor:
        return torch.ones(self.config["hidden_size"], dtype=self.dtype)
