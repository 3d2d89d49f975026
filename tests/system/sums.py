"""Sums of adapters that scale or replace what the base has, and the models that compute the same in
transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from inference_svc.core import Part, Sum
from tests.support.models.parity import relative_rms
from tests.support.models.zoo import quiet
from tests.system.engines import Running
from tests.system.kinds import TOKENS, Kinds

Parts = tuple[tuple[str, float], ...]

SUMS: dict[str, Parts] = {
    "magnitudes between others": (("plain", 0.75), ("dora", 1.0), ("small", -0.5)),
    "norms, a head and rows": (("norms", 1.0), ("plain", 0.5), ("head", 1.0), ("rows", 1.0)),
    "biases of the base and an embedding": (("small", 2.0), ("bias=all", 1.0), ("embedding", 1.0)),
    "magnitudes of other targets than the biases": (
        ("dora of both ends", 1.0),
        ("bias=lora_only", 1.0),
    ),
    "tokens that one adds": ((TOKENS, 1.0), ("plain", 0.5)),
}


def merged(zoo: Kinds, adapter: str) -> dict[str, torch.Tensor]:
    """Returns the model's weights with an adapter in them."""
    with quiet():
        model = copy.deepcopy(zoo.references[adapter]).merge_and_unload(adapter_names=[adapter])
    return model.state_dict()


def summed(zoo: Kinds, parts: Parts) -> Any:
    """Returns the base model with what each part changes of each weight, times its scale."""
    model = copy.deepcopy(zoo.reference)
    changed = [(merged(zoo, name), scale) for name, scale in parts]
    vocab_size = max(len(state["model.embed_tokens.weight"]) for state, _ in changed)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    base, state = zoo.reference.state_dict(), model.state_dict()
    for name, weight in base.items():
        total = weight.clone()
        for own, scale in changed:
            total += scale * (own[name][: len(weight)] - weight)
            if len(own[name]) > len(weight):
                state[name][len(weight) :] = own[name][len(weight) :]
        state[name][: len(weight)] = total
    model.load_state_dict(state)
    return model.eval()


def digest_of(running: Running, parts: Parts) -> str:
    return Sum(tuple(Part(running.digests[name], scale) for name, scale in parts))


@torch.no_grad()
def check_sum(
    oracle: Any, prompt: Sequence[int], running: Running, name: str, recorded: dict[str, Any]
) -> None:
    tokens, last = running.result(name)
    assert last.error is None, last.error
    given = torch.tensor([[*prompt, *tokens[:-1]]])
    expected = oracle(input_ids=given).logits[0, len(prompt) - 1 :]
    got = torch.stack([each[: expected.shape[1]] for each in recorded[name]])
    assert relative_rms(got, expected) < 1e-4, name
    assert len(tokens) == 64
    assert tokens == expected.argmax(dim=-1).tolist()
