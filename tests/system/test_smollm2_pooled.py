"""A real model with trained adapters embeds and judges as transformers and PEFT do, in fp32 and in
bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

from inference_svc.results.chosen_logits import ChosenLogits, ChosenLogitsOption
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import PoolingOption
from tests.support.inference.results import parts_of
from tests.support.models import smollm2
from tests.system.embedded import embedding
from tests.system.engines import Running

pytestmark = pytest.mark.slow

SIZE = 576
MEMORY = {"max_model_len": 512, "kv_bytes": 64 << 20, "arena_bytes": 32 << 20}
POOLINGS = [PoolingOption(each, True, SIZE, SIZE) for each in (Pooling.MEAN, Pooling.LAST)]
TEXTS = (
    "The Eiffel Tower stands in Paris, and was built in 1889.",
    "I like tea.",
    "Where is it?",
    "A pirate's life is not for everybody, as those who have tried it will tell you. " * 3,
)
ANSWERS = ("No", "Yes")


class Wanted(NamedTuple):
    """The oracle's normalised vectors by pooling, and the logits of the last token."""

    vectors: dict[Pooling | None, np.ndarray]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def wanted_of() -> Callable[[str, str], Wanted]:
    """Returns the oracle's results for an adapter and a text, of one pass for both data types."""
    zoo, tokenizer = smollm2.reference(), smollm2.tokenizer()

    @cache
    def compute(adapter: str, text: str) -> Wanted:
        hidden, logits = zoo.hidden_and_logits(adapter, tokenizer.encode(text))
        rows = {Pooling.MEAN: hidden.mean(0), Pooling.LAST: hidden[-1]}
        vectors = {each: (row / row.norm()).numpy() for each, row in rows.items()}
        return Wanted(dict(vectors), logits[-1])

    return compute


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_and_judgements(
    wanted_of: Callable[[str, str], Wanted],
    start: Callable[..., Running],
    dtype: str,
    *,
    is_full: bool,
) -> None:
    """In bf16 directions are as near to those in fp32 as the model's own rounding lets them be.
    Unless the matrix is full, each adapter has every second text, and the poolings take turns."""
    running = start(smollm2.zoo(), dtype=dtype, **MEMORY)
    tokenizer = smollm2.tokenizer()
    token_ids = tuple(tokenizer.encode(each)[0] for each in ANSWERS)
    judged = ChosenLogitsOption(ANSWERS, token_ids)
    cases = [
        (f"{adapter} {index}", adapter, text, POOLINGS if is_full else [POOLINGS[place // 2 % 2]])
        for number, adapter in enumerate(("", *smollm2.ADAPTERS))
        for index, text in enumerate(TEXTS)
        for place in [number + index]
        if is_full or place % 2 == 0
    ]
    for name, adapter, text, poolings in cases:
        ids = tokenizer.encode(text)
        for each in poolings:
            running.submit(f"{each.pooling} {name}", ids, adapter, max_tokens=0, embedding=each)
        running.submit(f"score {name}", ids, adapter, max_tokens=0, options=(judged,))
    for name, adapter, text, poolings in cases:
        wanted = wanted_of(adapter, text)
        for each in poolings:
            found = embedding(running, f"{each.pooling} {name}", each)
            vector = wanted.vectors[each.pooling]
            if dtype == "float32":
                np.testing.assert_allclose(found, vector, atol=1e-4)
            assert found @ vector > 1 - 2e-3
        running.result(f"score {name}")
        [part] = parts_of(running.outputs[f"score {name}"], ChosenLogits)
        share = float(wanted.logits[list(token_ids)].softmax(-1)[1])
        assert part.share_of_last() == pytest.approx(
            share, abs=1e-4 if dtype == "float32" else 0.03
        )
    running.check_idle()
