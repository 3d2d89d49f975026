"""Adapters with invocation tokens (aLoRA) against PEFT, alone and next to others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from inference_svc.api.generate_call import activation_of
from inference_svc.results.logprobs import TokenLogprobs
from tests.support.inference.results import parts_of
from tests.support.models.zoo import ALL, AdapterSpec, Zoo, make_zoo
from tests.system.engines import Running
from tests.system.services import Services

INVOCATION = (5, 9, 5)
NUM_GREEDY = 64
TOKENS = {"alora": INVOCATION, "alora-short": (7,)}


def options_of(name: str) -> dict[str, Any]:
    """Returns options of PEFT's config."""
    return {"alora_invocation_tokens": list(TOKENS[name]), "task_type": "CAUSAL_LM"}


SPECS = (
    AdapterSpec("alora", 8, ALL, options_of("alora")),
    AdapterSpec("alora-short", 3, ["q_proj", "v_proj"], options_of("alora-short")),
    AdapterSpec("plain", 4, ALL),
)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    # PEFT's other adapters are active where an aLoRA is: each is asked by itself.
    return make_zoo("llama", tmp_path_factory.mktemp("alora"), SPECS)


def random_tokens(count: int, seed: int) -> list[int]:
    """Tokens none of which invokes an adapter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 128, (count,), generator=generator).tolist()


def prompt_of(before: int, after: int, seed: int = 0) -> list[int]:
    tokens = random_tokens(before + after, seed)
    return [*tokens[:before], *INVOCATION, *tokens[before:]]


def submit(
    running: Running, name: str, prompt: Sequence[int], adapter: str, **options: Any
) -> None:
    """Submits as `GenerateCall.to_requests` does."""
    tokens = TOKENS.get(adapter)
    activation = activation_of(prompt, tokens) if tokens else 0
    if activation is None:
        running.submit(name, prompt, **options)
    else:
        running.submit(name, prompt, adapter, activation=activation, **options)


PROMPTS = {
    "in the middle": prompt_of(40, 9),
    "at the start": prompt_of(0, 17),
    "at the end": prompt_of(33, 0),
    "twice": [*prompt_of(12, 10), *prompt_of(5, 7, seed=1)],
    "overlapping": [*random_tokens(6, 2), 5, 9, 5, 9, 5, 30],
    "absent": random_tokens(30, 3),
    "cut off at the end": [*random_tokens(20, 4), 5, 9],
    "longer than the prompt": [9, 5],
    "the whole prompt": list(INVOCATION),
}


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_alora_has_pefts_greedy_tokens(zoo: Zoo, start: Callable, *, native: bool) -> None:
    """All prompts together, with the base model, a plain adapter and another aLoRA next to them,
    in chunks that end anywhere."""
    running = start(zoo, native_kernels=native, max_prefill_chunk=7, max_batch_tokens=64)
    asked = [
        *((f"alora {name}", prompt, "alora") for name, prompt in PROMPTS.items()),
        ("base", PROMPTS["in the middle"], ""),
        ("plain", PROMPTS["in the middle"], "plain"),
        ("short", [*random_tokens(20, 5), 7, *random_tokens(9, 6)], "alora-short"),
    ]
    for name, prompt, adapter in asked:
        submit(running, name, prompt, adapter)
    for name, prompt, adapter in asked:
        tokens, last = running.result(name)
        assert last.error is None
        assert tokens == zoo.greedy(adapter, prompt, NUM_GREEDY, guess=tokens), name
    running.check_idle()


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_chunks_cross_the_activation_at_every_offset(
    zoo: Zoo, start: Callable, *, native: bool
) -> None:
    running = start(zoo, native_kernels=native, prefix_cache=False, max_prefill_chunk=8)
    asked = {f"{before}": prompt_of(before, 11) for before in range(9)}
    for name, prompt in asked.items():
        submit(running, name, prompt, "alora", max_tokens=8)
    for name, prompt in asked.items():
        assert running.result(name)[0] == zoo.greedy("alora", prompt, 8), name


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_bf16_runs_a_row_of_two_slots(zoo: Zoo, start: Callable, *, native: bool) -> None:
    """The first token equals that of a server that computes the two parts in steps of their own."""
    whole = start(zoo, native_kernels=native, dtype="bfloat16", prefix_cache=False)
    parts = start(
        zoo, native_kernels=native, dtype="bfloat16", prefix_cache=False, max_prefill_chunk=40
    )
    for running in (whole, parts):
        submit(running, "a", PROMPTS["in the middle"], "alora", max_tokens=1, logprobs=20)
    tops = [
        {i: p for t in parts_of(running.outputs["a"], TokenLogprobs) for i, p in t.top}
        for running in (whole, parts)
        if running.result("a")
    ]
    shared = tops[0].keys() & tops[1].keys()
    assert len(shared) >= 15
    assert all(abs(tops[0][i] - tops[1][i]) < 0.1 for i in shared)


def test_the_base_models_pages_are_shared_up_to_the_activation(zoo: Zoo, start: Callable) -> None:
    """By the base model, by two aLoRAs, and by none beyond."""
    running = start(zoo, page_size=4)
    prompt = [*random_tokens(41, 8), 7, *INVOCATION, *random_tokens(10, 9)]
    cached = {}
    for name, adapter in (
        ("base", ""),
        ("first", "alora"),
        ("second", "alora-short"),
        ("again", "alora"),
        ("plain", "plain"),
    ):
        submit(running, name, prompt, adapter)
        tokens, last = running.result(name)
        assert tokens == zoo.greedy(adapter, prompt, NUM_GREEDY, guess=tokens), name
        cached[name] = last.usage.cached_prompt_tokens
    # 42 // 4 and 41 // 4 whole pages before the activation, and all but the last of 55 tokens.
    assert cached == {"base": 0, "first": 40, "second": 40, "again": 52, "plain": 0}
    running.check_idle()


def test_an_alora_that_is_not_invoked_is_not_loaded(zoo: Zoo, start: Callable) -> None:
    running = start(zoo)
    submit(running, "a", PROMPTS["absent"], "alora", max_tokens=4)
    running.result("a")
    assert not running.engine.built.residency.device.residents()


def test_both_services_apply_it(services: Services, zoo: Zoo) -> None:
    """From the store's record to the response, which says whether the prompt invoked it."""
    shutil.copytree(zoo.adapter_dirs["alora"], services.sources / "alora")
    services.client.register("alora", f"file://{services.sources / 'alora'}")
    greedy = {"max_tokens": NUM_GREEDY, "temperature": 0.0, "ignore_eos": True}
    for name in ("in the middle", "absent"):
        done = services.client.complete(PROMPTS[name], adapter="alora", **greedy)
        assert list(done.token_ids) == zoo.greedy(
            "alora", PROMPTS[name], NUM_GREEDY, guess=done.token_ids
        )
        assert done.adapter is not None
        assert done.adapter.name == "default/alora@1"
        assert done.adapter.is_inactive == (name == "absent")


def test_preempted_aloras_keep_their_activation(zoo: Zoo, start: Callable) -> None:
    """What they have generated does not invoke them again, and is not the base model's."""
    page_bytes = 2 * 2 * 16 * 16 * 2 * 4  # keys and values, of 2 layers, 16 tokens of 2 heads of 16
    running = start(zoo, kv_bytes=14 * page_bytes, max_model_len=128)
    asked = {str(index): prompt_of(20, index, seed=index) for index in range(5)}
    with running.together("alora"):
        for name, prompt in asked.items():
            submit(running, name, prompt, "alora")
    for name, prompt in asked.items():
        tokens, last = running.result(name)
        assert last.error is None
        assert tokens == zoo.greedy("alora", prompt, NUM_GREEDY, guess=tokens), name
    assert running.engine.built.engine.scheduler.num_preemptions > 0
    running.check_idle()
