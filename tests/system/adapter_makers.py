"""What people do to make a folder with an adapter, each as a function of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.conversion.convert import convert
from adapter_store.checkpoint.conversion.strip import strip
from tests.support.models.trained import (
    PREFIX,
    WEIGHTS,
    Trainer,
    as_checkpoint,
    edited,
    renamed,
    sharded,
)


def lora(**options: Any) -> Callable[[Trainer], Path]:
    return lambda trainer: trainer.lora(**options)


def named(base: str | None) -> Callable[[Trainer], Path]:
    """With another name of the base model in its config."""
    return lambda trainer: edited(trainer.lora(), base_model_name_or_path=base)


def with_fields(**fields: Any) -> Callable[[Trainer], Path]:
    return lambda trainer: edited(trainer.lora(), **fields)


def checkpoint(change: Callable[[Any], None] | None = None) -> Callable[[Trainer], Path]:
    return lambda trainer: as_checkpoint(trainer, trainer.lora(), change)


def run_folder(trainer: Trainer) -> Path:
    adapted = trainer.adapt()
    for step in (500, 1000, 1500):
        trainer.train(adapted)
        as_checkpoint(trainer, trainer.save(adapted, f"checkpoint-{step}"), None)
    return trainer.folder


def several(first: str, *others: str) -> Callable[[Trainer], Path]:
    """Several adapters of one model: one named "default" lies at the top, others below."""

    def make(trainer: Trainer) -> Path:
        adapted = trainer.adapt(adapter_name=first, is_trained=False)
        for name in others:
            adapted.add_adapter(name, adapted.peft_config[first])
        trainer.train(adapted)
        return trainer.save(adapted)

    return make


def stripped(trainer: Trainer) -> Path:
    targets = ["q_proj", "embed_tokens", "lm_head"]
    whole = trainer.save(trainer.adapt(target_modules=targets), "whole")
    strip(whole, trainer.folder / "stripped", trainer.model_dir)
    return trainer.folder / "stripped"


def split(trainer: Trainer) -> Path:
    return sharded(trainer.save(trainer.adapt(), "whole"), trainer.folder / "sharded")


def whole(trainer: Trainer, *modules: str) -> Path:
    """As PEFT saves it, in a folder below."""
    options = {"save_embedding_layers": False} if "lm_head" in modules else {}
    targets = ["q_proj", "v_proj", *modules]
    return trainer.save(trainer.adapt(target_modules=targets), "whole", **options)


def tinkers(trainer: Trainer) -> Path:
    names = ("base_model.model.lm_head", "base_model.model.model.unembed_tokens")
    folder = trainer.folder / "tinker"
    return renamed(whole(trainer, "lm_head"), folder, *names, target_modules="all-linear")


def beside(name: str, is_uri: bool = False) -> Callable[[Trainer], Path | str]:
    """With one more file, which is not applied."""

    def make(trainer: Trainer) -> Path | str:
        folder = trainer.lora()
        (folder / name).write_bytes(b"x")
        return f"file://{folder}" if is_uri else folder

    return make


def pissa_converted(trainer: Trainer) -> Path:
    """As PEFT documents it: what training began with is subtracted in the end."""
    return pissa_ended(trainer)[1]


def pissa_ended(trainer: Trainer) -> tuple[Any, Path, Path]:
    """Returns a trained model, its adapter as PEFT converts it, and what it began with."""
    adapted = trainer.adapt(init_lora_weights="pissa", is_trained=False)
    adapted.peft_config["default"].init_lora_weights = True
    start = trainer.save(adapted, "start")
    trainer.train(adapted)
    end = trainer.save(adapted, "end", path_initial_model_for_weight_conversion=str(start))
    return adapted, end, start


def pissa_converted_by_loadout(trainer: Trainer) -> Path:
    """Saved as it was trained, and converted later."""
    adapted, _, start = pissa_ended(trainer)
    adapted.peft_config["default"].init_lora_weights = "pissa"
    trained = trainer.save(adapted, "trained")
    # What is trained here is random, and no nearer to its start than to nothing.
    convert(trained, trainer.folder / "plain", initial=start, force=True)
    return trainer.folder / "plain"


def another_row(trainer: Trainer) -> Path:
    folder = trainer.save(trainer.adapt(), save_embedding_layers=True)
    tensors = load_file(folder / WEIGHTS)
    tensors[f"{PREFIX}lm_head.weight"][7] += 1
    save_file(tensors, folder / WEIGHTS)
    return folder


def trained(*names: str, **options: Any) -> Callable[[Trainer], Path]:
    """With weights of the base that were trained, too."""

    def make(trainer: Trainer) -> Path:
        adapted = trainer.adapt(**options)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and any(each in name for each in names):
                torch.nn.init.normal_(parameter)
        return trainer.save(adapted)

    return make


def added_tokens(targets: list[str], **save_options: Any) -> Callable[[Trainer], Path]:
    """Two tokens are added, and the model's embedding resized."""

    def make(trainer: Trainer) -> Path:
        adapted = trainer.adapt(num_added=2, target_modules=targets)
        return as_checkpoint(trainer, trainer.save(adapted, **save_options), add_tokens)

    return make


def add_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<tool>", "</tool>"])


def another_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"


def in_bfloat16(trainer: Trainer) -> Path:
    adapted = trainer.adapt()
    return trainer.save(adapted.to(torch.bfloat16))


def whole_model(trainer: Trainer) -> Path:
    trainer.base.save_pretrained(trainer.folder)
    return trainer.folder


def unfinished(trainer: Trainer) -> Path:
    """A full disk cut the weights off."""
    folder = trainer.lora()
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    return folder


def diverged(trainer: Trainer) -> Path:
    adapted = trainer.adapt()
    parameter = next(p for name, p in adapted.named_parameters() if "lora_B" in name)
    parameter.data[0, 0] = float("nan")
    return trainer.save(adapted)


def ia3(trainer: Trainer) -> Path:
    return trainer.save(
        trainer.adapt(kind=peft.IA3Config, target_modules=["k_proj"], feedforward_modules=[])
    )
