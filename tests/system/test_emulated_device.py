"""A whole engine on an emulated GPU gives the tokens of transformers and PEFT: a hybrid model, with
states and pages on the device, and a model in few bits."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from inference_svc.grammars.grammar import Grammar
from tests.support.kernels.worker_process import Operations, Worker
from tests.support.models.quantised import zoo_in_few_bits
from tests.support.models.zoo import VOCAB, Zoo
from tests.system.emulated import Asked, Served
from tests.system.structured import EOS, zoo_vocabulary

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAGE_SIZE, STATE_PAGES = 4, 2
SIZES = {
    "max_model_len": 64,
    "max_sequences": 4,
    "max_batch_tokens": 32,
    "max_prefill_chunk": 20,
    "page_size": PAGE_SIZE,
    "state_pages": STATE_PAGES,
    "kv_bytes": 1 << 20,
    "arena_bytes": 1 << 20,
    "host_bytes": 1 << 20,
    "max_loras": 4,
}


def test_a_hybrid_model(zoos: Callable[[str], Zoo]) -> None:
    """Prompts in chunks beside decoding rows, adapters of all of its projections, and prefixes that
    go on at a stored state."""
    zoo, random_ = zoos("qwen3_5"), random.Random(5)
    shared = [random_.randrange(3, VOCAB) for _ in range(30)]
    rounds = [
        [("", shared, 4), ("r16", shared[:9], 4), ("r3", shared[5:6], 3)],
        [("", [*shared[:19], 7, 8], 2), ("r16", shared[:10], 2)],
    ]
    found = check_tokens(zoo, rounds)
    border = PAGE_SIZE * STATE_PAGES
    assert [num_cached for _, num_cached in found[1]] == [2 * border, border]


def test_a_model_in_few_bits(tmp_path: Path) -> None:
    """NF4 under plain adapters and DoRA, whose norms are of dequantised rows."""
    zoo, random_ = zoo_in_few_bits("nf4", tmp_path), random.Random(6)
    prompt = [random_.randrange(3, VOCAB) for _ in range(19)]
    names = ("", *zoo.adapter_dirs)
    check_tokens(zoo, [[(name, prompt[: 5 + 4 * i], 3) for i, name in enumerate(names)]])


def test_structured_answers(zoos: Callable[[str], Zoo]) -> None:
    """The masks of grammars, on a device's logits; the row without a form has the tokens of the
    model alone."""
    zoo = zoos("llama")
    grammars = [Grammar.regex("[ab]{4}c"), Grammar.choice(["yes", "no"])]
    worker = Worker(interpret=True)
    try:
        operations = Operations(worker, Path(__file__).parent / "emulated.py")
        *found, plain = operations.call(
            "structured", zoo.model_dir, zoo_vocabulary(), grammars, SIZES
        )
    finally:
        worker.close()
    letters, word = ("".join(map(chr, each[:-1])) for each in found)
    assert re.fullmatch("[ab]{4}c", letters)
    assert word in ("yes", "no")
    assert [each[-1] for each in found] == [EOS, EOS]
    assert len(plain) > len(word)


def check_tokens(zoo: Zoo, rounds: list[list[Asked]]) -> list[list[Served]]:
    """Returns the answers of an emulated device, whose tokens must be the reference's."""
    worker = Worker(interpret=True)
    try:
        operations = Operations(worker, Path(__file__).parent / "emulated.py")
        found = operations.call("generate", zoo.model_dir, zoo.adapter_dirs, rounds, SIZES)
    finally:
        worker.close()
    for requests, answers in zip(rounds, found, strict=True):
        for (adapter, prompt, count), (tokens, _) in zip(requests, answers, strict=True):
            assert tokens == zoo.greedy(adapter, prompt, count, tokens)
    return found
