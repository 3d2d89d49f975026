"""Folders with adapters as people make them: saved by `peft` of a tiny model, and moved about."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.models.zoo import VOCAB
from tests.support.store.cards import copied_cards

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclass
class Trainer:
    """Makes adapters of the model in `model_dir`, which `base` and `tokenizer` are, in `folder`."""

    model_dir: Path
    folder: Path
    base: Any
    tokenizer: Any

    @classmethod
    def load(cls, model_dir: Path, dtype: torch.dtype | str = "auto") -> Self:
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(model_dir)
        return cls(model_dir, model_dir.parent, base, tokenizer)

    def adapt(
        self,
        *,
        num_added: int = 0,
        kind: type = peft.LoraConfig,
        is_trained: bool = True,
        adapter_name: str = "default",
        **options: Any,
    ) -> Any:
        """Returns the model with a new adapter; `num_added` tokens are added to its vocabulary.
        Other options go to the config."""
        model = copy.deepcopy(self.base)
        if num_added:
            model.resize_token_embeddings(VOCAB + num_added)
        if kind is peft.LoraConfig:
            options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}
        with _quiet():
            adapted = peft.get_peft_model(model, kind(**options), adapter_name)
        if is_trained:
            self.train(adapted)
        return adapted

    def train(self, adapted: Any) -> None:
        """Gives it random weights that change what it generates, others at each call."""
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.3 / min(parameter.shape) ** 0.25)

    def save(self, adapted: Any, below: str = "", **options: Any) -> Path:
        """Saves into a folder below `folder`; returns it."""
        folder = self.folder / below if below else self.folder
        with _quiet(), copied_cards():
            adapted.save_pretrained(str(folder), **options)
        return folder

    def lora(self, **options: Any) -> Path:
        """Saves a new adapter, by default as people do."""
        return self.save(self.adapt(**options))

    def tokens_of(
        self, folder: Path, prompt: list[int], count: int, guess: Sequence[int] = ()
    ) -> list[int]:
        """Returns what PEFT continues a prompt with, greedily, past any end token. The base gets
        as many tokens as the adapter has saved embeddings of. A right guess takes one step."""
        base = copy.deepcopy(self.base)
        for name, tensor in _saved(folder).items():
            if name.endswith("embed_tokens.weight"):
                base.resize_token_embeddings(len(tensor))
        with _quiet():
            model = peft.PeftModel.from_pretrained(base, str(folder)).eval()
        if len(guess) == count:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *guess[:-1]]])).logits[0]
            if logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == list(guess):
                return list(guess)
        return self._greedy(model, prompt, count)

    def base_tokens(self, prompt: list[int], count: int) -> list[int]:
        return self._greedy(self.base, prompt, count)

    def _greedy(self, model: Any, prompt: list[int], count: int) -> list[int]:
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        with torch.no_grad():
            made = model.generate(input_ids=torch.tensor([prompt]), **options)
        tokens: list[int] = made[0, len(prompt) :].tolist()
        return tokens


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else {}


def edited(folder: Path, **fields: Any) -> Path:
    """Changes fields of an adapter's config."""
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def as_checkpoint(trainer: Trainer, folder: Path, change: Callable[[Any], None] | None) -> Path:
    """Adds what trainers save beside an adapter; `change` alters the tokenizer before."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = copy.deepcopy(trainer.tokenizer)
    if change is not None:
        change(tokenizer)
    tokenizer.save_pretrained(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": torch.ones(64)}, folder / name)
    (folder / "trainer_state.json").write_text('{"global_step": 500}')
    (folder / "README.md").write_text("# Model card")
    return folder


def sharded(whole: Path, folder: Path) -> Path:
    """Copies an adapter with its weights split into two files with an index."""
    folder.mkdir()
    shutil.copy(whole / CONFIG, folder)
    weights = load_file(whole / WEIGHTS)
    index: dict[str, str] = {}
    for number, names in enumerate([list(weights)[::2], list(weights)[1::2]], start=1):
        file = f"adapter_model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    content = {"metadata": {}, "weight_map": index}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(content))
    return folder


def as_mlx(whole: Path, folder: Path) -> Path:
    """Writes an adapter as MLX-LM saves one: A and B transposed, the scale in its own config."""
    config = json.loads((whole / CONFIG).read_text())
    modules = set()
    tensors = {}
    for key, value in load_file(whole / WEIGHTS).items():
        name = key.removeprefix(PREFIX).removesuffix(".weight")
        module, _, side = name.rpartition(".lora_")
        modules.add(module.partition(".layers.")[2].partition(".")[2] or module)
        tensors[f"{module}.lora_{side.lower()}"] = value.T.contiguous()
    parameters = {
        "rank": config["r"],
        "dropout": 0.0,
        "scale": config["lora_alpha"] / config["r"],
        "keys": sorted(modules),
    }
    fields = {
        "fine_tune_type": "lora",
        "lora_parameters": parameters,
        "num_layers": 16,
        "model": config["base_model_name_or_path"],
        "iters": 1000,
        "optimizer": "adam",
    }
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(fields))
    save_file(tensors, folder / "adapters.safetensors")
    save_file(tensors, folder / "0000100_adapters.safetensors")
    return folder


def renamed(whole: Path, folder: Path, old: str, new: str, **fields: Any) -> Path:
    """Copies an adapter with other names of its tensors, and `fields` of its config changed."""
    shutil.copytree(whole, folder)
    tensors = load_file(whole / WEIGHTS)
    save_file({key.replace(old, new): t for key, t in tensors.items()}, folder / WEIGHTS)
    return edited(folder, **fields)


def as_torchtune(trainer: Trainer, folder: Path) -> Path:
    """Reduces the config to what torchtune writes, and adds its own form and the whole model."""
    config = json.loads((folder / CONFIG).read_text())
    kept = ("r", "lora_alpha", "target_modules", "peft_type", "base_model_name_or_path")
    (folder / CONFIG).write_text(json.dumps({key: config[key] for key in kept}))
    torch.save({"layers.0.attn.q_proj.lora_a.weight": torch.ones(4)}, folder / "adapter_model.pt")
    shutil.copy(trainer.model_dir / "model.safetensors", folder)
    return folder


def _quiet() -> AbstractContextManager[Any]:
    """PEFT warns of what it saves along, and of keys that it does not know."""
    return warnings.catch_warnings(action="ignore")
