"""The requests of a round: plain data, the same for the same settings."""

from __future__ import annotations

import random
from dataclasses import dataclass

BASE = ""
"""The base model, in a list of adapters."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of a measurement: `num_requests` in each of `num_rounds`, `num_in_flight` at a
    time. Each request has its own prompt of `prompt_chars` characters, and generates exactly
    `num_tokens`."""

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
    """One request; `adapter` is a reference, or BASE."""

    adapter: str
    prompt: str


def plan(workload: Workload, round_number: int, adapters: list[str]) -> list[BenchRequest]:
    """Returns the requests of one round: the base model and every adapter equally often, shuffled.

    Args:
        workload: The settings.
        round_number: Number of the round; each has other prompts.
        adapters: References of adapters.
    """
    chooser = random.Random(f"{workload.seed}/{round_number}")
    names = [BASE, *adapters]
    chosen = [names[index % len(names)] for index in range(workload.num_requests)]
    chooser.shuffle(chosen)
    return [BenchRequest(name, _prompt(chooser, workload.prompt_chars)) for name in chosen]


def _prompt(chooser: random.Random, num_chars: int) -> str:
    """Returns words of random letters, which have about as many tokens in any tokenizer."""
    words: list[str] = []
    length = 0
    while length <= num_chars:
        word = "".join(chooser.choices("abcdefghijklmnopqrstuvwxyz", k=chooser.randint(2, 8)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:num_chars]
