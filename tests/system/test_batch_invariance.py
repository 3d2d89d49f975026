"""A request's greedy tokens are the same alone and in any company, whatever memory does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tests.support.native import native_library
from tests.system.engines import check_case_happened

NUM_TOKENS = 24

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks-of-1": {"max_prefill_chunk": 1},
    "chunks-of-7": {"max_prefill_chunk": 7, "max_batch_tokens": 70},
    "no-prefix-cache": {"prefix_cache": False},
    # Room for about two sequences: others are preempted and recomputed.
    "preemption": {"kv_bytes": 96 << 10, "max_model_len": 96},
    "preemption-no-prefix-cache": {
        "kv_bytes": 96 << 10,
        "max_model_len": 96,
        "prefix_cache": False,
    },
    # Room for the largest image and a half.
    "small-arena": {"arena_bytes": 360 << 10},
    "two-slots": {"max_loras": 2},
    "host-tier": {"arena_bytes": 360 << 10, "host_bytes": 2 << 20},
    "small-host-tier": {"arena_bytes": 360 << 10, "host_bytes": 360 << 10},
    "torch": {"native_kernels": False},
}


OTHERS = ("gemma3", "gemma4", "phi3", "cohere2", "qwen2-moe", "gpt-oss")
"""Models beside Llama: windows, two rotations, parts of heads, halves side by side, experts."""
QUICK = ("chunks-of-7", "preemption")
"""Cases of other models than Llama, which take turns."""
RUNS = [
    *(("llama", case) for case in CASES),
    *(
        pytest.param(
            kind, case, marks=() if case == QUICK[number % len(QUICK)] else pytest.mark.long
        )
        for number, kind in enumerate(OTHERS)
        for case in list(CASES)[1:6]
    ),
]


def settings_of(kind: str, case: str) -> dict[str, Any]:
    """Returns the case's settings; Gemma's heads are larger."""
    settings = dict(CASES[case])
    if kind == "gemma3" and "kv_bytes" in settings:
        settings["kv_bytes"] = settings["kv_bytes"] * 3 // 2
    return settings


def requests(names: list[str]) -> list[tuple[str, list[int]]]:
    """Ten requests: the base twice, each adapter, and one prefix shared by two of one adapter."""
    rng = random.Random(5)
    adapters = ["", *names, "", names[0]]
    prompts = [
        [rng.randrange(3, 128) for _ in range(rng.choice([3, 20, 41, 64]))] for _ in adapters
    ]
    prompts[-1] = prompts[1] + prompts[-1][:5]
    return list(zip(adapters, prompts, strict=True))


several_mixes = pytest.mark.parametrize(
    "num_mixes", [3, pytest.param(10, marks=pytest.mark.long)], ids=["3 mixes", "10 mixes"]
)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[int, list[int]]]:
    """Each request's tokens when nothing else runs, by the kind of the model; filled by the first
    test that needs them."""
    return {}


def run_alone(
    kind: str, start: Callable, alone: dict[str, dict[int, list[int]]]
) -> dict[int, list[int]]:
    if kind not in alone:
        running, found = start(kind), alone.setdefault(kind, {})
        for index, (adapter, prompt) in enumerate(requests(list(running.digests))):
            running.submit(f"{index}", prompt, adapter, max_tokens=NUM_TOKENS)
            found[index] = running.result(f"{index}")[0]
    return alone[kind]


@several_mixes
@pytest.mark.parametrize(("kind", "case"), RUNS)
def test_alone_and_in_any_mix_the_same_tokens(
    kind: str, case: str, num_mixes: int, start: Callable, alone: dict[str, dict[int, list[int]]]
) -> None:
    expected = run_alone(kind, start, alone)
    running = start(kind, **settings_of(kind, case))
    asked = requests(list(running.digests))
    for mix in range(num_mixes):
        rng = random.Random(mix)
        order = rng.sample(range(len(asked)), rng.randint(4, len(asked)))
        is_short = mix == 0 and case.startswith("preemption")
        with running.together(*running.digests) if is_short else nullcontext():
            for index in order:
                adapter, prompt = asked[index]
                running.submit(f"{mix}-{index}", prompt, adapter, max_tokens=NUM_TOKENS)
                time.sleep(rng.choice([0.0, 0.0, 0.004]))
        for index in order:
            tokens, last = running.result(f"{mix}-{index}")
            assert last.error is None
            assert tokens == expected[index], (mix, index)
    check_case_happened(case, running)
    running.check_idle()


@pytest.mark.parametrize("native_kernels", [True, False])
def test_without_adapters_the_lora_path_is_not_entered(
    native_kernels: bool, start: Callable
) -> None:
    from kernels.lora import num_calls

    if native_kernels:
        native_library()
    running = start(native_kernels=native_kernels)
    running.submit("load", [5, 6], "r16", max_tokens=1)
    running.result("load")
    before, steps = num_calls(), running.engine.built.engine.runner.backend.num_lora_steps
    assert steps > 0
    assert native_kernels or before > 0
    for index in range(4):
        running.submit(f"{index}", [5 + index] * 9, "", max_tokens=8)
    for index in range(4):
        running.result(f"{index}")
    assert num_calls() == before
    assert running.engine.built.engine.runner.backend.num_lora_steps == steps


def test_seeded_sampling_is_the_same_in_any_company(start: Callable) -> None:
    """Also when preempted: the counter is the position, not the step."""
    drawn = {}
    for case in ("plain", "preemption"):
        running = start(**CASES[case])
        names = list(running.digests)
        with running.together(*names) if case == "preemption" else nullcontext():
            for index, (adapter, prompt) in enumerate(requests(names)):
                options = {"max_tokens": 16, "temperature": 0.9, "top_p": 0.95, "seed": index}
                running.submit(f"{index}", prompt, adapter, **options)
                if case == "plain":
                    running.result(f"{index}")
        drawn[case] = [running.result(f"{index}")[0] for index in range(len(names) + 3)]
        check_case_happened(case, running)
    assert drawn["plain"] == drawn["preemption"]
