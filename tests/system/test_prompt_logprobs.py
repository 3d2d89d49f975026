"""Log probabilities of prompts: those of transformers and peft, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from inference_svc.core import PackedLogprobs
from tests.system.engines import Running
from tests.system.test_parity import prompts
from tests.system.zoo import Zoo

BACKENDS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
ADAPTER = "r16"
PAGE_SIZE = 16
PROMPT = prompts(5, seed=3)[4]
"""300 tokens."""


def scores(running: Running, request_id: str) -> PackedLogprobs:
    """Returns all of a request's, which come in order and once, from the second token on."""
    running.result(request_id)
    pieces = [each for output in running.outputs[request_id] for each in output.scores]
    position = 1
    for piece in pieces:
        assert piece.first_position == position
        position += piece.num_tokens
    joined = (np.concatenate(arrays) for arrays in zip(*(p[1:] for p in pieces), strict=True))
    return PackedLogprobs(1, *joined)


def ask(running: Running, name: str, prompt: list[int], adapter: str = "", **options: int) -> None:
    options = {"max_tokens": 0, "prompt_logprobs": 5} | options
    running.submit(name, prompt, adapter, **options)


def check(found: PackedLogprobs, prompt: list[int], logits: torch.Tensor, top_k: int = 5) -> None:
    """`logits` [T, vocab] are the oracle's."""
    expected = logits.log_softmax(-1)[:-1].numpy()
    assert found.num_tokens == len(prompt) - 1
    assert found.top_k == min(top_k, expected.shape[1])
    assert found.token_ids.tolist() == prompt[1:]
    own = np.take_along_axis(expected, found.token_ids[:, None], 1)
    assert np.abs(found.logprobs - own[:, 0]).max(initial=0) < 1e-4
    tops = -np.sort(-expected, axis=1)[:, : found.top_k]
    assert np.abs(found.top_logprobs - tops).max(initial=0) < 1e-4
    assert np.abs(np.take_along_axis(expected, found.top_ids, 1) - tops).max(initial=0) < 1e-4
    # A rank may differ where others are equally likely up to rounding.
    assert ((expected > own + 1e-4).sum(1) < found.ranks).all()
    assert ((expected > own - 1e-4).sum(1) >= found.ranks).all()


@BACKENDS
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "qwen3-moe"])
def test_they_are_the_oracles(
    zoos: Callable[[str], Zoo], start: Callable, kind: str, native: bool
) -> None:
    """Of base and adapters in one batch, beside requests that are not scored."""
    zoo, running = zoos(kind), start(kind, max_model_len=512, native_kernels=native)
    names = ["", *running.digests]
    asked = [prompt for prompt in prompts(len(names) + 1, seed=3) if len(prompt) > 1]
    for name, prompt in zip(names, asked, strict=False):
        ask(running, f"scored {name}", prompt, name)
        running.submit(f"other {name}", prompt, name, max_tokens=4)
    for name, prompt in zip(names, asked, strict=False):
        found = scores(running, f"scored {name}")
        check(found, prompt, zoo.logits(name, prompt, torch.float32))
        running.result(f"other {name}")
    running.check_idle()


@BACKENDS
@pytest.mark.parametrize("chunk", [1, PAGE_SIZE, 100, len(PROMPT) - 1, len(PROMPT), 512])
def test_chunks_and_prefixes_change_nothing(
    zoos: Callable[[str], Zoo], start: Callable, chunk: int, native: bool
) -> None:
    zoo = zoos("llama")
    running = start(
        zoo, max_model_len=512, native_kernels=native, max_prefill_chunk=chunk, max_sequences=7
    )
    expected = zoo.logits(ADAPTER, PROMPT, torch.float32)
    running.submit("before", PROMPT, ADAPTER, max_tokens=1)
    running.result("before")
    ask(running, "scored", PROMPT, ADAPTER, prompt_logprobs=3, max_tokens=2)
    check(scores(running, "scored"), PROMPT, expected, 3)
    tokens, last = running.result("scored")
    assert last.usage.cached_prompt_tokens == 0
    assert len(tokens) == 2
    # Its pages are others' to share.
    running.submit("after", PROMPT, ADAPTER, max_tokens=2)
    assert running.result("after")[0] == tokens
    assert running.result("after")[1].usage.cached_prompt_tokens == (len(PROMPT) - 1) // 16 * 16
    running.check_idle()


@BACKENDS
def test_preempted_requests_score_each_token_once(
    zoos: Callable[[str], Zoo], start: Callable, native: bool
) -> None:
    zoo, count = zoos("llama"), 60
    page_bytes = 2 * 2 * 2 * 32 * 16 * 4
    running = start(
        zoo, max_model_len=128, native_kernels=native, max_prefill_chunk=8, kv_bytes=12 * page_bytes
    )
    asked = [prompt[:60] for prompt in prompts(6, seed=7) if len(prompt) > 1]
    for index, prompt in enumerate(asked):
        ask(running, str(index), prompt, max_tokens=count, prompt_logprobs=index)
    for index, prompt in enumerate(asked):
        check(scores(running, str(index)), prompt, zoo.logits("", prompt, torch.float32), index)
    assert running.engine.built.engine.scheduler.num_preemptions > 0
    running.check_idle()
