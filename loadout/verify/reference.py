"""The log probabilities of transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

ADAPTER_CONFIG = "adapter_config.json"
MODEL_CONFIG = "config.json"
GGUF = ".gguf"
GGUF_FILE = "gguf_file"
"""The option of transformers that names a GGUF file in a folder."""
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


class BadReference(Exception):
    """The reference cannot be computed; the message tells why."""


@contextmanager
def _failures_named(adapter: Path, model: str) -> Iterator[None]:
    """Raises BadReference for any failure of transformers, PEFT or torch, which have many kinds: a
    damaged file, a base model of another size, a full memory."""
    try:
        yield
    except Exception as error:
        raise BadReference(
            f"the reference of {adapter} on the base model {model} cannot be computed: {error}"
        ) from error


class Reference:
    """A base model with an adapter, on this machine's accelerator if it has one.

    Args:
        adapter: Folder of the adapter in PEFT's format.
        model: The base model's folder, its name in the Hub's cache, a GGUF file, or a folder with
            one. Weights of a GGUF file are dequantised.
        dtype: The dtype that the base model computes in, such as "bfloat16".

    Raises:
        ImportError: PEFT is not installed.
        BadReference: The model or the adapter cannot be read, or they do not fit each other.
    """

    def __init__(self, adapter: Path, model: str, dtype: str) -> None:
        from peft import PeftModel  # of the extra "verify"

        check_folder(adapter)  # PEFT would look for a missing one on the Hub
        found, options = _place(model)
        self._names = adapter, model
        self._device = torch.accelerator.current_accelerator() or torch.device("cpu")
        with _failures_named(*self._names):
            self._tokenizer = AutoTokenizer.from_pretrained(found, **options)
            base = AutoModelForCausalLM.from_pretrained(
                found, dtype=getattr(torch, dtype), **options, **_dequantising(options)
            )
            # Not merged: the sum of both weights would be rounded, as it is not in the service.
            self._model: Any = PeftModel.from_pretrained(base, adapter).to(self._device).eval()
        has_config = getattr(base.config, "quantization_config", None) is not None
        self.is_quantised = GGUF_FILE in options or has_config
        """Whether the base model's weights are in few bits in its files."""

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

        Raises:
            BadReference: The model does not know a token, or its memory is full.
        """
        given = torch.tensor([list(tokens)], device=self._device)
        with _failures_named(*self._names):
            with nullcontext() if with_adapter else self._model.disable_adapter():
                logits = self._model(input_ids=given).logits[0, :-1]
            scores = logits.float().log_softmax(dim=-1)
            found = scores.gather(1, torch.from_numpy(ids).to(self._device))
            best = scores.amax(dim=-1)
            return found.double().cpu().numpy(), best.double().cpu().numpy()


def _place(model: str) -> tuple[str, dict[str, Any]]:
    """Returns where transformers finds a model, and its options to read it. Raises BadReference for
    several GGUF files, or without the package that reads them."""
    options: dict[str, Any] = {"local_files_only": True}
    path = Path(model)
    if path.is_file() and path.suffix.lower() == GGUF:
        path, files = path.parent, [path.name]
    elif path.is_dir() and not (path / MODEL_CONFIG).exists():
        files = sorted(each.name for each in path.iterdir() if each.suffix.lower() == GGUF)
    else:
        return model, options
    if len(files) > 1:
        raise BadReference(f"{model} has {len(files)} GGUF files: name one of them with --model")
    if not files:
        return model, options
    if find_spec("gguf") is None:
        raise BadReference("the reference of a GGUF file needs gguf: pip install 'loadout[verify]'")
    return str(path), {**options, GGUF_FILE: files[0]}


def _dequantising(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option with which transformers dequantises a GGUF file. Versions without it
    always do."""
    if GGUF_FILE not in options or not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def check_folder(adapter: Path) -> str:
    """Returns the base model that an adapter's folder names; "" if it names none.

    Raises:
        BadReference: It is not the folder of an adapter in PEFT's format.
    """
    path = adapter / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadReference(
            f"{path} cannot be read ({error}): give the folder of an adapter in PEFT's format"
        ) from error
    if not isinstance(config, dict):
        raise BadReference(f"{path} is no JSON object")
    if not any((adapter / name).is_file() for name in WEIGHTS):
        raise BadReference(f"{adapter} has neither {' nor '.join(WEIGHTS)}")
    return str(config.get("base_model_name_or_path") or "")
