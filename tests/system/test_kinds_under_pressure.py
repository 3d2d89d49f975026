"""Adapters of every kind give the same tokens alone and in any company, whatever memory does."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from inference_svc.engine.transport.messages import Command
from tests.support.models.parity import RecordingSampler
from tests.support.pairs import PATHS
from tests.system.engines import Running, check_case_happened
from tests.system.kinds import ADDED, Kinds, make_kinds

NUM_TOKENS, NUM_RANDOM = 12, 80
PAGE_BYTES = 2 * 2 * 16 * 2 * 32 * 4
"""Keys and values, of 2 layers, 16 tokens of 2 heads of 32."""
LARGEST_IMAGE = 220 << 10
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks-of-7": {"max_prefill_chunk": 7, "max_batch_tokens": 70},
    # Room for about two sequences: others are preempted and recomputed.
    "preemption": {"kv_bytes": 10 * PAGE_BYTES, "max_model_len": 96},
    "preemption-no-prefix-cache": {
        "kv_bytes": 10 * PAGE_BYTES,
        "max_model_len": 96,
        "prefix_cache": False,
    },
    "two-slots": {"max_loras": 2},
    "small-arena": {"arena_bytes": LARGEST_IMAGE * 3 // 2},
    "small-host-tier": {
        "arena_bytes": LARGEST_IMAGE * 3 // 2,
        "host_bytes": LARGEST_IMAGE * 3 // 2,
    },
}
QUICK_TORCH = ("plain", "preemption")
Asked = list[tuple[str, list[int]]]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds("qwen3", tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module")
def asked(zoo: Kinds) -> Asked:
    """Two requests of each kind: one continues the other's prompt."""
    chosen, found = random.Random(5), []
    for name in zoo.names:
        length = chosen.choice([20, 41, 58])
        prompt = zoo.prompt_of(name, [chosen.randrange(20, 128) for _ in range(length)])
        found += [(name, prompt), (name, [*prompt, *prompt[:5]])]
    return found


@pytest.fixture
def begin(zoo: Kinds, start: Callable) -> Callable[..., tuple[Running, RecordingSampler]]:
    """Starts an engine whose logits are kept."""

    def made(**settings: Any) -> tuple[Running, RecordingSampler]:
        running = start(zoo, max_added_tokens=len(ADDED), adapter_wait_s=60.0, **settings)
        recorder = RecordingSampler(running.engine.decoder.eos_token_ids)
        running.engine.built.engine.runner.sampler = recorder
        return running, recorder

    return made


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """The tokens of each request when nothing else runs, by path; filled by the first test that
    needs them. That they are PEFT's is shown by test_kinds."""
    return {}


def run_alone(running: Running, zoo: Kinds, asked: Asked) -> list[list[int]]:
    found = []
    for index, (name, prompt) in enumerate(asked):
        zoo.submit(running, f"{index}", prompt, name, max_tokens=NUM_TOKENS)
        tokens, last = running.result(f"{index}")
        assert last.error is None, (name, last.error)
        found.append(tokens)
    return found


@pytest.mark.parametrize("num_mixes", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("case", "path"),
    [
        pytest.param(
            *(case, path),
            marks=() if path == "native" or case in QUICK_TORCH else pytest.mark.long,
        )
        for path in PATHS
        for case in CASES
    ],
)
def test_alone_and_in_any_mix_the_same_tokens(
    zoo: Kinds,
    asked: Asked,
    begin: Callable,
    alone: dict[str, Any],
    case: str,
    path: str,
    num_mixes: int,
) -> None:
    native_kernels = PATHS[path]
    if path not in alone:
        running, _ = begin(native_kernels=native_kernels, prefix_cache=False)
        alone[path] = run_alone(running, zoo, asked)
    running, _ = begin(native_kernels=native_kernels, **CASES[case])
    for mix in range(num_mixes):
        order = random.Random(mix).sample(range(len(asked)), len(asked))
        is_short = mix == 0 and case.startswith("preemption")
        with running.together(*zoo.adapter_dirs) if is_short else nullcontext():
            for index in order:
                name, prompt = asked[index]
                zoo.submit(running, f"{mix}-{index}", prompt, name, max_tokens=NUM_TOKENS)
        for index in order:
            tokens, last = running.result(f"{mix}-{index}")
            assert last.error is None, (asked[index][0], last.error)
            assert tokens == alone[path][index], (mix, asked[index][0])
    check_case_happened(case, running)
    running.check_idle()


def test_prefixes_of_each_kind_are_found_again(zoo: Kinds, asked: Asked, begin: Callable) -> None:
    """By requests of the same adapter, up to the last whole page before the last token."""
    running, _ = begin()
    for index, (name, prompt) in enumerate(asked):
        zoo.submit(running, f"{index}", prompt, name, max_tokens=1)
        usage = running.result(f"{index}")[1].usage
        assert usage is not None
        shared = len(prompt) - 5 if index % 2 else 0
        assert usage.cached_prompt_tokens == shared // 16 * 16, name


def test_logits_are_the_same_bits_in_any_batch(zoo: Kinds, asked: Asked, begin: Callable) -> None:
    """In fp32, by the native kernels: alone, among all kinds, and in another order."""
    running, recorder = begin(prefix_cache=False)
    run_alone(running, zoo, asked)
    for mix, order in {"mix": [*range(len(asked))], "turned": [*range(len(asked))][::-1]}.items():
        for index in order:
            name, prompt = asked[index]
            zoo.submit(running, f"{mix}-{index}", prompt, name, max_tokens=NUM_TOKENS)
        for index in order:
            running.result(f"{mix}-{index}")
        for index, (name, _) in enumerate(asked):
            pairs = zip(recorder.logits[f"{index}"], recorder.logits[f"{mix}-{index}"], strict=True)
            for position, (one, other) in enumerate(pairs):
                num_known = min(len(one), len(other))
                assert torch.equal(one[:num_known], other[:num_known]), (mix, name, position)


def checked(step: Callable[..., Any], check: Callable[[], None], messages: list[Any]) -> Any:
    """Steps as `Engine.step` does, and checks."""
    found = step(messages)
    check()
    return found


def test_random_loads_and_evictions_leave_the_accounts_whole(
    zoo: Kinds, asked: Asked, begin: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accounts agree after every step, while adapters are loaded, evicted and unloaded."""
    running, _ = begin(
        max_loras=4,
        arena_bytes=LARGEST_IMAGE * 3,
        host_bytes=LARGEST_IMAGE * 4,
        kv_bytes=16 * PAGE_BYTES,
        max_model_len=96,
    )
    engine = running.engine.built.engine
    monkeypatch.setattr(engine, "step", partial(checked, engine.step, engine.check_integrity))
    chosen, adapters = random.Random(0), [*zoo.adapter_dirs]
    for index in range(NUM_RANDOM):
        name, prompt = chosen.choice(asked)
        zoo.submit(running, f"{index}", prompt, name, max_tokens=chosen.randint(1, NUM_TOKENS))
        if chosen.random() < 0.15:
            running.cancel(f"{chosen.randint(0, index)}")
        if chosen.random() < 0.2:
            running.call(chosen.choice([Command.LOAD, Command.UNLOAD]), chosen.choice(adapters))
    for index in range(NUM_RANDOM):
        running.until(lambda index=index: running.is_done(f"{index}"), 120)
        error = running.result(f"{index}")[1].error
        assert error is None, (index, error)
    # About forty, and fewer where requests of one adapter wait together.
    assert running.engine.built.residency.device.num_evictions > 10
    running.check_idle()
