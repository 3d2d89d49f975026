"""A real model with trained adapters embeds and judges as transformers and PEFT do, in fp32 and in
bf16."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from inference_svc.results.chosen_logits import ChosenLogits, ChosenLogitsOption
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import PoolingOption
from tests.support.inference.results import parts_of
from tests.support.models import smollm2
from tests.support.models.zoo import Zoo
from tests.system.embedded import embedding, expected
from tests.system.engines import Running

pytestmark = pytest.mark.slow

SIZE = 576
MEMORY = {"max_model_len": 512, "kv_bytes": 64 << 20, "arena_bytes": 32 << 20}
MEAN, LAST = (PoolingOption(each, True, SIZE, SIZE) for each in (Pooling.MEAN, Pooling.LAST))
TEXTS = (
    "The Eiffel Tower stands in Paris, and was built in 1889.",
    "I like tea.",
    "Where is it?",
    "A pirate's life is not for everybody, as those who have tried it will tell you. " * 6,
)
ANSWERS = ("No", "Yes")


@pytest.fixture(scope="module")
def reference() -> Zoo:
    return smollm2.reference()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_and_judgements(reference: Zoo, start: Callable[..., Running], dtype: str) -> None:
    """In bf16 directions are as near to those in fp32 as the model's own rounding lets them be."""
    running = start(smollm2.zoo(), dtype=dtype, **MEMORY)
    tokenizer = smollm2.tokenizer()
    token_ids = tuple(tokenizer.encode(each)[0] for each in ANSWERS)
    judged = ChosenLogitsOption(ANSWERS, token_ids)
    cases = [
        (f"{adapter} {index}", adapter, tokenizer.encode(text))
        for adapter in ("", *smollm2.ADAPTERS)
        for index, text in enumerate(TEXTS)
    ]
    for name, adapter, ids in cases:
        running.submit(f"mean {name}", ids, adapter, max_tokens=0, embedding=MEAN)
        running.submit(f"last {name}", ids, adapter, max_tokens=0, embedding=LAST)
        running.submit(f"score {name}", ids, adapter, max_tokens=0, options=(judged,))
    for name, adapter, ids in cases:
        for kind, each in (("mean", MEAN), ("last", LAST)):
            found = embedding(running, f"{kind} {name}", each)
            wanted = expected(reference, adapter, ids, each)
            if dtype == "float32":
                np.testing.assert_allclose(found, wanted, atol=1e-4)
            assert found @ wanted > 1 - 2e-3
        running.result(f"score {name}")
        [part] = parts_of(running.outputs[f"score {name}"], ChosenLogits)
        logits = reference.logits(adapter, ids, torch.float32)[-1, list(token_ids)]
        share = float(logits.softmax(-1)[1])
        assert part.share_of_last() == pytest.approx(
            share, abs=1e-4 if dtype == "float32" else 0.03
        )
    running.check_idle()
