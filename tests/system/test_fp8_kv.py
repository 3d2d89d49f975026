"""Keys and values in FP8: every backend computes the same, near what plain ones give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inference_svc.app import resolve_settings
from inference_svc.auto_settings import Machine, to_engine_config
from inference_svc.backends.base import num_kv_pages
from inference_svc.config import InferenceSettings
from inference_svc.model.architectures import load_description
from tests.support.models.parity import RecordingSampler, prompts, relative_rms
from tests.system.services import Services

KINDS = ("llama", "gpt-oss", "gemma3")
"""With groups of heads, with sinks and windows, and with two shapes of keys and values."""
OTHERS = ("gemma4", "qwen3_5")
"""Layers that share keys, and recurrent ones."""
MOST_APART = {"gemma4": 1e-2}
"""The distance that native kernels may have from torch, where 5e-3 is too little."""
NUM_TOKENS = 12

Answers = dict[str, tuple[list[int], torch.Tensor]]
"""The tokens of each request, and their logits."""


def answer(start: Callable, kind: str, **settings: object) -> Answers:
    """Answers one prompt with the base model and each adapter, in one batch."""
    running = start(kind, max_model_len=512, **settings)
    recorder = RecordingSampler(running.engine.decoder.eos_token_ids)
    running.engine.built.engine.runner.sampler = recorder
    names = ["", *running.digests]
    for name, prompt in zip(names, prompts(len(names)), strict=True):
        running.submit(name, prompt, name, max_tokens=NUM_TOKENS)
    found = {name: running.result(name)[0] for name in names}
    running.check_idle()
    return {name: (found[name], torch.stack(recorder.logits[name])) for name in names}


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)]
)
def test_native_kernels_answer_as_torch_does(kind: str, start: Callable) -> None:
    """A key that lies between two codes may fall on either side, by how its sums are ordered; plain
    keys and values are further away."""
    by_torch = answer(start, kind, kv_dtype="fp8", native_kernels=False)
    native = answer(start, kind, kv_dtype="fp8")
    plain = answer(start, kind)
    for name, (tokens, logits) in by_torch.items():
        own_tokens, own_logits = native[name]
        assert own_tokens == tokens, name or "base"
        exact = plain[name][1]
        most, further = MOST_APART.get(kind, 5e-3), relative_rms(logits, exact)
        assert relative_rms(own_logits, logits) < min(most, further / 2), name or "base"
        assert 1e-3 < relative_rms(logits[:1], exact[:1]) < 0.3, name or "base"


@pytest.mark.parametrize("shape", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_ranks_answer_as_one_process_does(shape: dict[str, int], start: Callable) -> None:
    """Each vector has a scale of its own, whichever rank has its head."""
    alone = answer(start, "llama", kv_dtype="fp8")
    ranks = answer(start, "llama", kv_dtype="fp8", **shape)
    for name, (tokens, logits) in alone.items():
        own_tokens, own_logits = ranks[name]
        assert own_tokens == tokens, name or "base"
        assert relative_rms(own_logits, logits) < 5e-3, name or "base"


def test_a_prefix_is_shared_with_the_same_bits(start: Callable) -> None:
    running = start("llama", max_model_len=512, kv_dtype="fp8", prefix_cache=True)
    [prompt] = prompts(1, seed=5)
    prompt = (prompt * 40)[:200]
    for name in ("first", "second"):
        running.submit(name, prompt, max_tokens=NUM_TOKENS)
        running.result(name)
    (first, _), (second, last) = (running.result(name) for name in ("first", "second"))
    assert second == first
    assert last.usage.cached_prompt_tokens >= 192
    running.check_idle()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_go_on_with_the_same_tokens(prefix_cache: bool, start: Callable) -> None:
    """Of a model with windows; with room for about two sequences."""

    def answers(**settings: object) -> tuple[list[list[int]], int, int]:
        running = start("gemma3", max_model_len=96, kv_dtype="fp8", **settings)
        names = ["", *running.digests] * 3
        for index, (name, prompt) in enumerate(zip(names, prompts(len(names)), strict=True)):
            running.submit(str(index), prompt[:50], name, max_tokens=24)
        tokens = [running.result(str(index))[0] for index in range(len(names))]
        running.check_idle()
        engine = running.engine.built.engine
        backend = engine.runner.backend
        num_preempted = engine.commands.describe().counters["preemptions"]
        return tokens, num_preempted, backend.kv_bytes // backend.num_pages

    expected, num_preempted, page_bytes = answers()
    assert not num_preempted
    settings = {"kv_bytes": 8 * page_bytes, "max_sequences": 8, "prefix_cache": prefix_cache}
    tokens, num_preempted, _ = answers(**settings)
    assert num_preempted
    assert tokens == expected


def test_the_same_memory_holds_almost_twice_the_tokens(start: Callable) -> None:
    num_pages = {}
    for kind in ("auto", "fp8"):
        running = start("llama", kv_dtype=kind, dtype="bfloat16", kv_bytes=1 << 20)
        backend = running.engine.built.engine.runner.backend
        num_pages[kind] = backend.num_pages
        assert backend.kv_bytes <= 1 << 20
    head_dim = running.engine.decoder.attentions[0].head_dim
    gain = 2 * head_dim / (head_dim + 4)
    assert num_pages["fp8"] == int((1 << 20) / ((1 << 20) // num_pages["auto"]) * gain)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_settings_count_tokens_as_pages_do(kind: str, kv_dtype: str, zoos: Callable) -> None:
    folder = zoos(kind).model_dir
    decoder = load_description(folder)
    asked = InferenceSettings.model_validate(
        {"model": folder, "kv_dtype": kv_dtype, "kv_memory": "64KiB", "dtype": "bfloat16"}
    )
    settings = resolve_settings(asked, Machine(has_cuda=False), decoder)
    assert settings.max_model_len < decoder.max_position_embeddings, "the pages decide"
    num_pages = num_kv_pages(to_engine_config(settings), decoder)
    assert settings.max_model_len == num_pages * settings.page_size


def test_a_server_says_so_and_wakes_up_with_it(zoos: Callable, tmp_path: Path) -> None:
    flags = ("--kv-dtype", "fp8")
    with Services(zoos("llama"), tmp_path, inference_flags=flags) as services:
        client = services.client
        info = client.server_info()
        assert (info.dtype, info.kv_dtype) == ("float32", "fp8")
        [prompt] = prompts(1)
        before = client.complete(prompt, temperature=0, max_tokens=NUM_TOKENS)
        client.sleep()
        client.wake()
        assert client.complete(prompt, temperature=0, max_tokens=NUM_TOKENS).token_ids == (
            before.token_ids
        )
        services.check_exit_codes()
