"""A tiny model and adapters whose answers are known: computed by transformers, not by us."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from bench.models import SHAPES, make_model

NAME = "bench-tiny"
RANK = 4
SCALE = 2.0
STRENGTH = 0.1
"""Standard deviation of A and B: what they add is about as large as the model's own weights."""
MOST_TOKENS = 32
MIN_GAP = 2e-4
"""Between the best logit and the next: far above rounding, so that greedy answers are exact."""
NUM_DISTINCT = 4
"""No two adapters' answers begin with the same so many tokens."""
PROMPTS = ((5, 17, 42, 8), (300, 7, 7, 91, 204, 11))

Answers = tuple[tuple[int, ...], ...]
"""The greedy tokens after each of PROMPTS."""


@dataclass(frozen=True)
class Content:
    """An adapter: as a folder, as tensors, and what it answers."""

    folder: Path
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    digest: str
    answers: Answers


@dataclass(frozen=True)
class Known:
    """A model's folder, its own answers, and adapters."""

    model_dir: Path
    answers: Answers
    contents: tuple[Content, ...]

    def by_digest(self) -> dict[str, Answers]:
        """Returns what each digest answers; the base model has the digest ""."""
        return {"": self.answers} | {each.digest: each.answers for each in self.contents}


def text_of(tokens: tuple[int, ...]) -> str:
    """Returns what the model's tokenizer makes of these."""
    return "".join(f"{token} " for token in tokens)


def make_known(folder: Path, number: int) -> Known:
    """Makes a model and `number` adapters under `folder`. Torch has one thread from then on: on a
    busy machine several wait for each other."""
    torch.set_num_threads(1)
    make_model(folder / "model", NAME)
    model = SHAPES[NAME].model_class.from_pretrained(folder / "model", dtype=torch.float32)
    base = _answers(model)
    assert base is not None, "the model itself is nearly undecided about a token"
    contents: list[Content] = []
    starts = {_start(base)}
    for index, (tensors, answers) in zip(range(number), _decided(model, starts), strict=False):
        contents.append(_save(folder / "sources" / f"adapter-{index}", tensors, answers))
    return Known(folder / "model", base, tuple(contents))


def _decided(model: Any, starts: set[Answers]) -> Iterator[tuple[dict[str, torch.Tensor], Answers]]:
    """Yields adapters that are never nearly undecided, and differ from all before."""
    generator = torch.Generator().manual_seed(39)
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    while True:
        tensors: dict[str, torch.Tensor] = {}
        for name, module in linears.items():
            for side, shape in (
                ("A", (RANK, module.in_features)),
                ("B", (module.out_features, RANK)),
            ):
                values = torch.randn(shape, generator=generator) * STRENGTH
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = values
        answers = _answers_with(model, linears, tensors)
        if answers is not None and _start(answers) not in starts:
            starts.add(_start(answers))
            yield tensors, answers


def _answers_with(
    model: Any, linears: Mapping[str, torch.nn.Linear], tensors: Mapping[str, torch.Tensor]
) -> Answers | None:
    before = {name: module.weight.data for name, module in linears.items()}
    for name, module in linears.items():
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        module.weight.data = before[name] + SCALE * (b @ a)
    try:
        return _answers(model)
    finally:
        for name, module in linears.items():
            module.weight.data = before[name]


@torch.inference_mode()
def _answers(model: Any) -> Answers | None:
    """Returns the greedy answers; None if the model is nearly undecided about one of the tokens."""
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        cache = transformers.DynamicCache(config=model.config)
        ids = torch.tensor([tokens])
        for _ in range(MOST_TOKENS):
            logits = model(ids, past_key_values=cache, use_cache=True).logits[0, -1]
            best = logits.topk(2)
            if best.values[0] - best.values[1] < MIN_GAP:
                return None
            tokens.append(int(best.indices[0]))
            ids = torch.tensor([tokens[-1:]])
        found.append(tuple(tokens[len(prompt) :]))
    return tuple(found)


def _start(answers: Answers) -> Answers:
    return tuple(each[:NUM_DISTINCT] for each in answers)


def _save(folder: Path, tensors: dict[str, torch.Tensor], answers: Answers) -> Content:
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": NAME,
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    digest = open_checkpoint(folder, CheckpointLimits()).digest
    return Content(folder, tensors, config, digest, answers)
