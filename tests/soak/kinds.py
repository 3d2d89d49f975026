"""Adapters of every kind for the endurance test of the engine, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bench.models import Prepared, prepare_adapter
from inference_svc.core import AdapterKey, Part, Sum

BASE, SUM = "base", "sum"
PLAIN, ALORA, ADDED = "lora", "alora", "added-tokens"
NUM_ADDED = 2
BASE_SHARE = SUM_SHARE = 0.1
MOST_SUMMED = 3
OTHERS_SHARE = 0.5
"""Of the sums those with one adapter that has more than A and B."""


class Asked(NamedTuple):
    """What a request is for: adapters and prompt, and from which token on its adapter is active."""

    kind: str
    key: AdapterKey
    prompt: list[int]
    activation: int = 0


def options_of(vocab: int) -> dict[str, dict[str, Any]]:
    """Returns what the adapter of each kind has besides A and B of all layers."""
    tokens = list(range(vocab, vocab + NUM_ADDED))
    rows = list(range(0, 64, 2))
    return {
        "bias-of-b": {"lora_bias": True},
        "dora": {"use_dora": True},
        "norms": {"modules_to_save": ["norm", "input_layernorm", "post_attention_layernorm"]},
        "whole": {"modules_to_save": ["embed_tokens", "lm_head"]},
        "rows": {"trainable_token_indices": {"embed_tokens": rows, "lm_head": [1, 7]}},
        ALORA: {"alora_invocation_tokens": [3, 5], "task_type": "CAUSAL_LM"},
        ADDED: {
            "trainable_token_indices": {"embed_tokens": tokens, "lm_head": tokens},
            "num_added": NUM_ADDED,
        },
    }


def with_kinds(prepared: Prepared) -> Prepared:
    """Adds an adapter of each kind to the plain one. Makes what is not there yet."""
    (plain,) = prepared.adapters.values()
    adapters = {PLAIN: plain}
    for number, (kind, options) in enumerate(options_of(prepared.vocab).items(), start=1):
        adapters[kind] = folder = plain.with_name(f"kind-{kind}")
        prepare_adapter(prepared, folder, number, **options)
    return replace(prepared, adapters=adapters)


@dataclass
class Kinds:
    """The kinds that adapters are of, `digests` in turn."""

    names: Sequence[str]
    digests: Sequence[str]
    vocab: int

    def draw(self, chosen: random.Random, adapter: int, prompt: list[int]) -> Asked:
        """Returns a request for this adapter, for the base model or for a sum."""
        share = chosen.random()
        if share < BASE_SHARE:
            return Asked(BASE, "", prompt)
        if share < BASE_SHARE + SUM_SHARE:
            return Asked(SUM, self._sum(chosen), prompt)
        return self.of(chosen, adapter, prompt)

    def of(self, chosen: random.Random, adapter: int, prompt: list[int]) -> Asked:
        kind = self.names[adapter % len(self.names)]
        activation = chosen.randrange(len(prompt)) if kind == ALORA else 0
        if kind == ADDED:
            prompt = [*prompt]
            prompt[chosen.randrange(len(prompt))] = self.vocab + chosen.randrange(NUM_ADDED)
        return Asked(kind, self.digests[adapter], prompt, activation)

    def _sum(self, chosen: random.Random) -> Sum:
        """Returns plain ones, and one of any kind that may be summed: two that replace the same do
        not go together. What replaces has the scale 1."""
        places = {name: place for place, name in enumerate(self.names) if name != ALORA}
        plain = self.digests[places.pop(PLAIN) :: len(self.names)]
        summed = chosen.sample(plain, chosen.randint(2, min(MOST_SUMMED, len(plain))))
        scales = [chosen.choice((0.5, 1.0, -0.25)) for _ in summed]
        if places and chosen.random() < OTHERS_SHARE:
            place = chosen.choice([*places.values()])
            summed[0], scales[0] = chosen.choice(self.digests[place :: len(self.names)]), 1.0
        return Sum(tuple(map(Part, summed, scales)))
