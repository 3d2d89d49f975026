"""The requests of a round: plain data, the same for the same settings."""

from __future__ import annotations

import random
from dataclasses import dataclass

BASE = ""
"""Stands for the base model among adapters."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` in each of `num_rounds`, `num_in_flight` at a time. Each has a prompt of
    `prompt_chars` characters of its own, and generates exactly `num_tokens`."""

    num_requests: int = 64
    num_in_flight: int = 8
    num_rounds: int = 5
    prompt_chars: int = 128
    num_tokens: int = 32
    num_loads: int = 4
    """Adapters that are unloaded and loaded again in each round."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """`adapter` is a reference, or BASE."""

    adapter: str
    prompt: str


def plan(workload: Workload, round_number: int, adapters: list[str]) -> list[BenchRequest]:
    """Returns one round: the base model and every adapter equally often, in mixed order."""
    chooser = random.Random(f"{workload.seed}/{round_number}")
    names = [BASE, *adapters]
    chosen = [names[index % len(names)] for index in range(workload.num_requests)]
    chooser.shuffle(chosen)
    return [BenchRequest(name, _prompt(chooser, workload.prompt_chars)) for name in chosen]


def _prompt(chooser: random.Random, num_chars: int) -> str:
    """Returns words of letters: about as many tokens whatever the tokenizer."""
    words: list[str] = []
    length = 0
    while length <= num_chars:
        word = "".join(chooser.choices("abcdefghijklmnopqrstuvwxyz", k=chooser.randint(2, 8)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:num_chars]
