"""The log probabilities of transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

ADAPTER_CONFIG = "adapter_config.json"


class Reference:
    """A base model with an adapter, on this machine's accelerator if it has one.

    Args:
        adapter: Folder of the adapter in PEFT's format.
        model: The base model's folder, or its name in the Hub's cache.
        dtype: The dtype that the base model computes in, such as "bfloat16".

    Raises:
        ImportError: PEFT is not installed.
        OSError: The model or the adapter cannot be read.
        ValueError: transformers or PEFT refuses one of them.
    """

    def __init__(self, adapter: Path, model: str, dtype: str) -> None:
        from peft import PeftModel  # of the extra "verify"

        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._device = torch.accelerator.current_accelerator() or torch.device("cpu")
        base = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), local_files_only=True
        )
        # Not merged: the sum of both weights would be rounded, as it is not in the service.
        self._model: Any = PeftModel.from_pretrained(base, adapter).to(self._device).eval()

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """Returns the tokens that the model's own tokenizer makes of a prompt."""
        return tuple(self._tokenizer(prompt)["input_ids"])

    @torch.no_grad()
    def logprobs(
        self, tokens: Sequence[int], ids: NDArray[np.int64], *, with_adapter: bool = True
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns natural log probabilities at all tokens but the first.

        Args:
            tokens: Prompt and answer.
            ids: The tokens to score at each position, [len(tokens) - 1, any].
            with_adapter: False: of the base model.

        Returns:
            The log probabilities of `ids`, in their shape, and those of the most likely tokens,
            [len(tokens) - 1].
        """
        given = torch.tensor([list(tokens)], device=self._device)
        with nullcontext() if with_adapter else self._model.disable_adapter():
            logits = self._model(input_ids=given).logits[0, :-1]
        scores = logits.float().log_softmax(dim=-1)
        found = scores.gather(1, torch.from_numpy(ids).to(self._device))
        return found.double().cpu().numpy(), scores.amax(dim=-1).double().cpu().numpy()


def base_model_of(adapter: Path) -> str:
    """Returns the base model that an adapter's folder names; "" if it names none. Raises OSError,
    or ValueError for a file that is no JSON object."""
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{adapter / ADAPTER_CONFIG} is no JSON object")
    return str(config.get("base_model_name_or_path") or "")
