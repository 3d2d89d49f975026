"""Ranks answer as one process does, whatever happens around a request: little memory, prompts in
chunks, common prefixes, more adapters than fit, and cancelled requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loadout.prometheus import scrape
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.services import Services

NUM_TOKENS = 64
ADAPTERS = ("", "r1", "r3", "r8", "r16", "r33", "embed")
PAGES_BYTES = {"llama": 14 * 4096, "qwen3-moe": 14 * 8192, "qwen3_5": 14 * 4096}
"""Of a rank: of 16 tokens each, fewer than two requests have."""
PRESSURE = ("--max-model-len", "160", "--max-sequences", "6", "--max-batch-tokens", "7")
STAGES = ("--pipeline-parallel", "2")
Ask = tuple[str, list[int]]


@pytest.mark.parametrize(
    ("kind", "count", "more"),
    [
        ("llama", 2, ()),
        pytest.param("llama", 4, (), marks=pytest.mark.long),
        pytest.param("llama", 2, ("--fully-sharded-loras",), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, (), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 4, (), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, ("--expert-parallel", "2"), marks=pytest.mark.long),
        pytest.param("qwen3_5", 2, (), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, ("--fully-sharded-loras",), marks=pytest.mark.long),
        pytest.param("qwen3_5", 2, ("--fully-sharded-loras",), marks=pytest.mark.long),
        ("llama", 1, STAGES),
        pytest.param("llama", 2, STAGES, marks=pytest.mark.long),
        pytest.param("llama", 2, (*STAGES, "--fully-sharded-loras"), marks=pytest.mark.long),
        pytest.param("qwen3-moe", 1, STAGES, marks=pytest.mark.long),
        pytest.param("qwen3-moe", 2, STAGES, marks=pytest.mark.long),
        pytest.param("qwen3_5", 1, STAGES, marks=pytest.mark.long),
        pytest.param("qwen3_5", 2, STAGES, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_any_company_leaves_the_tokens_of_ranks(
    kind: str, count: int, more: tuple[str, ...], zoos: Callable[[str], Zoo], tmp_path: Path
) -> None:
    """Greedy in fp32: the tokens are PEFT's."""
    zoo, chosen = zoos(kind), random.Random(count)
    pages_bytes = PAGES_BYTES[kind]
    if STAGES[0] in more:  # one of two has all layers of a hybrid with keys and values
        pages_bytes = pages_bytes * (1 + (kind == "qwen3_5")) // count
    flags = (
        *("--base-model", kind, "--tensor-parallel", str(count), "--max-loras", "2", *PRESSURE),
        *("--kv-memory", str(pages_bytes), "--adapter-wait-seconds", "120", *more),
    )
    with Services(zoo, tmp_path, inference_flags=flags) as services:
        for name in filter(None, ADAPTERS):
            services.client.register(name, services.source(name))
        asks: list[Ask] = []
        for name in ADAPTERS:
            prompt = [chosen.randrange(5, 128) for _ in range(40)]
            asks += [(name, prompt), (name, [*prompt, *prompt[:9]])]
        chosen.shuffle(asks)
        left = [(ask, chosen.choice([0, 1, 9])) for ask in chosen.sample(asks, 6)]
        with ThreadPoolExecutor(len(asks) + len(left)) as threads:
            answers = [threads.submit(answer, services, ask, NUM_TOKENS) for ask in asks]
            leaving = [threads.submit(answer, services, *one) for one in left]
            for each in leaving:
                each.result(300)
            found = [each.result(300) for each in answers]
        for _ in range(2):  # the second finds the first one's pages
            assert answer(services, asks[0], NUM_TOKENS) == found[0]
        check_ends(services, len(asks) + 2, [num_tokens for _, num_tokens in left])
        metrics = scrape(services.inference_metrics)
    for (name, prompt), tokens in zip(asks, found, strict=True):
        assert tokens == zoo.greedy(name, prompt, NUM_TOKENS, guess=tokens), name
    for name in ("preemptions", "tier_evictions", "cached_prompt_tokens"):
        assert metrics.sum(f"loadout_inference_{name}_total") > 0, name
    assert services.exit_codes == [0, 0]


def check_ends(services: Services, num_whole: int, left: list[int]) -> None:
    """Each request is counted by its end; one whose client left as cancelled, unless the client was
    late. A server may never hear of one that was left before its first token."""
    num_late = 0.0

    def all_ended() -> bool:
        nonlocal num_late
        metrics, name = scrape(services.inference_metrics), "loadout_inference_requests_total"
        cancelled = metrics.sum(name, finish_reason="cancelled")
        num_late = metrics.sum(name, finish_reason="length") - num_whole
        assert metrics.sum(name) == num_whole + num_late + cancelled, "no other end"
        return num_late >= 0 and sum(map(bool, left)) <= num_late + cancelled <= len(left)

    until(all_ended)
    assert num_late < sum(map(bool, left)), "none was cancelled"


def answer(services: Services, ask: Ask, num_tokens: int) -> list[int]:
    """Returns the first tokens of an answer, of which no more are wanted then."""
    name, prompt = ask
    found: list[int] = []
    with services.client.generate(
        prompt, adapter=name, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
    ) as chunks:
        for chunk in chunks if num_tokens else ():
            found += chunk.token_ids
            if len(found) >= num_tokens:
                break
    return found
