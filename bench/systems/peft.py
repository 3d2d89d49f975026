"""transformers, and PEFT's mixed batches, in their own environment."""

from __future__ import annotations

import time
from typing import Any

import peft
import torch
import transformers

from bench.systems.protocol import Done, Job, Spec


class PeftSystem:
    """transformers and PEFT, for which `max_resident` and `max_len` are no limits.

    Prompts of one job have the same length. The base has its own model, which PEFT does not wrap.
    """

    def load(self, spec: Spec) -> dict[str, str]:
        torch.set_num_threads(spec.num_threads)
        self._folders = dict(spec.adapters)
        model: Any = transformers.AutoModelForCausalLM
        self._base, self._wrapped = (
            model.from_pretrained(spec.model_dir, dtype=torch.bfloat16).eval() for _ in range(2)
        )
        self._model: Any = None
        self._loaded: set[str] = set()
        versions = (torch, transformers, peft)
        return {module.__name__: module.__version__ for module in versions}

    def register(self, name: str, folder: str) -> None:
        self._folders[name] = folder

    def set_resident(self, names: list[str]) -> None:
        """Loads missing adapters, and unloads none, because adapters without requests cost PEFT
        nothing."""
        for name in names:
            if name in self._loaded:
                continue
            if self._model is None:
                self._model = peft.PeftModel.from_pretrained(
                    self._wrapped, self._folders[name], adapter_name=name
                )
            else:
                self._model.load_adapter(self._folders[name], adapter_name=name)
            self._loaded.add(name)
        if self._model is not None:
            self._model = self._model.to(torch.bfloat16).eval()

    def run(self, job: Job) -> Done:
        """Runs a job; for one adapter it uses PEFT's fast path, without a name for each row."""
        num_tokens = job.asks[0].max_tokens
        prompts = torch.tensor([ask.prompt for ask in job.asks])
        options: dict[str, Any] = {
            "input_ids": prompts,
            "attention_mask": torch.ones_like(prompts),
            "max_new_tokens": num_tokens,
            "min_new_tokens": num_tokens,
            "do_sample": False,
            "pad_token_id": 0,
        }
        names = [ask.adapter or "__base__" for ask in job.asks]
        began_s = time.perf_counter()
        with torch.inference_mode():
            if set(names) == {"__base__"}:
                out = self._base.generate(**options)
            elif len(set(names)) == 1:
                self._model.set_adapter(names[0])
                out = self._model.generate(**options)
            else:
                out = self._model.generate(adapter_names=names, **options)
        seconds = time.perf_counter() - began_s
        assert out.shape == (len(job.asks), prompts.shape[1] + num_tokens)
        return Done(seconds, num_tokens * len(job.asks))

    def close(self) -> None:
        """Does nothing, because the process ends."""


def make_system() -> PeftSystem:
    return PeftSystem()
