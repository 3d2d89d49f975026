"""Embeddings are those of transformers and peft, however a prompt is computed, and whatever runs
beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inference_svc.core import FinishReason
from inference_svc.results.embedding_rule import Pooling
from tests.support.models.parity import prompts
from tests.support.models.zoo import Zoo
from tests.support.pairs import PATHS, crossed
from tests.system.embedded import SIZE, embedding, expected, option
from tests.system.engines import check_case_happened

ADAPTERS = ("", "r1", "r3", "r8", "r16", "r33", "r64", "embed")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks-of-7": {"max_prefill_chunk": 7, "max_batch_tokens": 70},
    "few-rows": {"max_sequences": 3},
    "no-prefix-cache": {"prefix_cache": False},
    # Room for about two sequences: others are preempted and recomputed.
    "preemption": {"kv_bytes": 416 << 10, "max_prefill_chunk": 8},
    "two-slots": {"max_loras": 2},
    "two-ranks": {"tensor_parallel": 2, "max_prefill_chunk": 7},
}
QUICK = {*((case, "native") for case in CASES), ("plain", "torch"), ("preemption", "torch")}


@pytest.mark.parametrize(("case", "path"), crossed(QUICK, CASES, PATHS))
def test_any_mix_equals_transformers(
    zoos: Callable[[str], Zoo], start: Callable, case: str, path: str
) -> None:
    """Each pooling, with each adapter, beside rows that generate with all of them."""
    zoo = zoos("llama")
    running = start("llama", max_model_len=320, native_kernels=PATHS[path], **CASES[case])
    asked = prompts(16, seed=5)
    wanted = {}
    with running.together(*ADAPTERS[1:]):
        for index, adapter in enumerate(ADAPTERS):
            running.submit(f"tokens {index}", asked[index], adapter, max_tokens=20)
        for index, prompt in enumerate(asked):
            for pooling in Pooling:
                adapter = ADAPTERS[(index + len(wanted)) % len(ADAPTERS)]
                name, size = f"{pooling.value} {index}", (SIZE, 24)[index % 2]
                each = option(pooling, is_normalised=index % 3 > 0, dimensions=size)
                running.submit(name, prompt, adapter, max_tokens=0, embedding=each)
                wanted[name] = adapter, prompt, each
    for name, (adapter, prompt, each) in wanted.items():
        found = embedding(running, name, each)
        np.testing.assert_allclose(found, expected(zoo, adapter, prompt, each), atol=1e-4)
    for index, adapter in enumerate(ADAPTERS):
        tokens, _ = running.result(f"tokens {index}")
        assert tokens == zoo.greedy(adapter, asked[index], 20, tokens)
    check_case_happened(case, running)
    running.check_idle()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "qwen2-moe", "lfm2"])
@pytest.mark.parametrize("path", PATHS)
def test_other_families_embed(
    zoos: Callable[[str], Zoo], start: Callable, kind: str, path: str
) -> None:
    """With norms of heads, windows, experts and recurrent layers; a chunk ends within each."""
    zoo, prompt = zoos(kind), prompts(2, seed=9)[1]
    running = start(kind, max_prefill_chunk=7, native_kernels=PATHS[path])
    for adapter in ("", "r16"):
        for pooling in Pooling:
            name, each = f"{adapter} {pooling}", option(pooling)
            running.submit(name, prompt, adapter, max_tokens=0, embedding=each)
            found = embedding(running, name, each)
            np.testing.assert_allclose(found, expected(zoo, adapter, prompt, each), atol=1e-4)
    running.check_idle()


def test_the_prefix_cache_saves_tokens_that_are_not_pooled(
    zoos: Callable[[str], Zoo], start: Callable
) -> None:
    """The last token's vector needs no other computed again; a mean needs all."""
    zoo, running, prompt = zoos("llama"), start("llama", max_model_len=320), prompts(5)[4]
    assert len(prompt) == 300
    cached = {}
    for turn in ("first", "second"):
        for pooling in (Pooling.MEAN, Pooling.LAST):
            name, each = f"{pooling.value} {turn}", option(pooling)
            running.submit(name, prompt, "r16", max_tokens=0, embedding=each)
            found = embedding(running, name, each)
            np.testing.assert_allclose(found, expected(zoo, "r16", prompt, each), atol=1e-4)
            cached[name] = running.result(name)[1].usage.cached_prompt_tokens
    assert cached == {"mean first": 0, "last first": 288, "mean second": 0, "last second": 288}
    # A prompt whose only uncomputed token is its last one, beside rows that generate.
    running.submit("known", prompt[:289], "r16", max_tokens=1)
    running.result("known")
    running.submit("tokens", prompts(1)[0], "r3", max_tokens=60)
    running.until(lambda: running.outputs.get("tokens"))
    each = option(Pooling.LAST)
    running.submit("one", prompt[:289], "r16", max_tokens=0, embedding=each)
    found = embedding(running, "one", each)
    np.testing.assert_allclose(found, expected(zoo, "r16", prompt[:289], each), atol=1e-4)
    assert running.result("one")[1].usage.cached_prompt_tokens == 288
    running.result("tokens")
    running.check_idle()


def test_a_tenant_that_floods_waits_for_no_other(start: Callable) -> None:
    """Another tenant's inputs and answers come first, though its flood was there before."""
    running = start("llama", max_sequences=4, max_batch_tokens=64, prefix_cache=False)
    each, prompt = option(Pooling.MEAN), prompts(2)[1]
    flood = [f"flood {index}" for index in range(300)]
    for name in flood:
        running.submit(name, prompt, "r16", max_tokens=0, tenant="loud", embedding=each)
    running.submit("vector", prompt, "r3", max_tokens=0, tenant="quiet", embedding=each)
    running.submit("tokens", prompt, "r3", max_tokens=8, tenant="quiet")
    running.result("vector")
    running.result("tokens")
    assert sum(map(running.is_done, flood)) < 100
    for name in flood:
        running.cancel(name)
    running.until(lambda: all(map(running.is_done, flood)))
    running.check_idle()


def test_a_cancelled_prompt_leaves_nothing(start: Callable) -> None:
    running = start("llama", max_model_len=320, max_prefill_chunk=4, max_batch_tokens=64)
    prompt = prompts(5)[4]
    for pooling in Pooling:
        each = option(pooling)
        running.submit(pooling.value, prompt, "r16", max_tokens=0, embedding=each)
        running.cancel(pooling.value)
    for pooling in (Pooling.MEAN, Pooling.LAST):
        assert running.result(pooling.value)[1].finish_reason is FinishReason.ABORTED
    running.result(Pooling.FIRST.value)
    running.check_idle()
