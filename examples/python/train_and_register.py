"""Registers every checkpoint of a training run, in a callback for trainers of transformers and TRL.

python train_and_register.py NAME MODEL_DIR BASE_MODEL OUT_DIR

You need transformers, accelerate and peft. MODEL_DIR is a model's folder in Hugging Face's format,
and BASE_MODEL is the model's name at your servers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from loadout import Client
from loadout.errors import LoadoutError

INFERENCE = os.environ.get("LOADOUT_INFERENCE", "127.0.0.1:7080")
STORE = os.environ.get("LOADOUT_STORE", "127.0.0.1:7070")
TOKEN = os.environ.get("LOADOUT_TOKEN")

STEPS, KEEP = 4, 2
TEXTS = ["loadout=LOADOUT", "adapter=ADAPTER"]


class RegisterCheckpoints(TrainerCallback):
    """Registers each checkpoint as the newest version of one name, and keeps `keep` versions.

    If a registration fails, the callback reports it and the training continues to the next
    checkpoint. With several processes only the first one registers.
    """

    def __init__(self, client: Client, name: str, base_model: str = "", keep: int = 5) -> None:
        self._client = client
        self._name = name
        self._base_model = base_model
        self._keep = keep

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **unused: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        try:
            done = self._client.register(
                self._name,
                checkpoint,
                base_model=self._base_model,
                keep=self._keep,
                labels={"step": str(state.global_step)},
            )
        except LoadoutError as error:
            print(f"{checkpoint.name} is not registered: {error}", file=sys.stderr)
        else:
            print(f"{checkpoint.name} is {done.adapter.ref}")


def make_trainer(model_dir: str, out_dir: str, callback: TrainerCallback) -> Trainer:
    """Returns a trainer of a few steps, with a checkpoint after each."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tokens = [tokenizer(text)["input_ids"] for text in TEXTS]
    arguments = TrainingArguments(
        out_dir,
        max_steps=STEPS,
        save_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(
        get_peft_model(model, lora),
        arguments,
        train_dataset=[{"input_ids": each, "labels": each} for each in tokens],
        callbacks=[callback],
    )


def main(name: str, model_dir: str, base_model: str, out_dir: str) -> None:
    with Client(inference=INFERENCE, store=STORE, token=TOKEN) as client:
        make_trainer(
            model_dir, out_dir, RegisterCheckpoints(client, name, base_model, KEEP)
        ).train()
        versions = [each.version for each in client.versions(name) if each.delete_time is None]
        print(f"versions of {name}: {versions}")
        answer = client.complete("loadout=", adapter=name, temperature=0, max_tokens=8)
        assert answer.adapter is not None
        print(f"{answer.adapter.name} answers {answer.text}")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        print(
            "usage: python train_and_register.py NAME MODEL_DIR BASE_MODEL OUT_DIR", file=sys.stderr
        )
        sys.exit(2)
    main(*sys.argv[1:])
