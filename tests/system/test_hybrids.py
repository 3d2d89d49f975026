"""Requests of every kind to a model with recurrent layers, whose states follow them as pages do.

Moves between versions: test_version_identity. Preemption, cancels and sleep: test_recurrence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_svc.api.generate_call import activation_of
from inference_svc.core import Request, SamplingParams
from inference_svc.engine.transport.messages import Command
from inference_svc.model.inputs import StepInputs
from servicekit.errors import Internal
from tests.support.inference.stepped import Engine, faulty_engine, requests, tokens_of
from tests.support.models.zoo import AdapterSpec, Zoo, make_zoo, modules_of
from tests.system.engines import Running
from tests.system.prompt_scores import ask, check, scores

KIND = "qwen3_5"
PAGE, BORDER = 4, 8
INVOCATION = (5, 9, 5)
ALORA = {"alora_invocation_tokens": list(INVOCATION), "task_type": "CAUSAL_LM"}
# PEFT's reference takes an aLoRA for a plain adapter if that is not the first.
SPECS = (
    AdapterSpec("alora", 8, modules_of(KIND), ALORA),
    AdapterSpec("plain", 4, modules_of(KIND)),
)
FAULTY = 99
"""A token that no other prompt has."""
BACKENDS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return make_zoo(KIND, tmp_path_factory.mktemp("hybrids"), SPECS)


Start = Callable[..., Running]


@pytest.fixture
def begin(start: Start, zoo: Zoo) -> Start:
    """Starts an engine with short pages and intervals."""

    def made(*, native: bool, **changes: Any) -> Running:
        sizes = {"page_size": PAGE, "state_pages": BORDER // PAGE, "num_stored_states": 32}
        return start(zoo, native_kernels=native, **(sizes | changes))

    return made


def prompt_of(seed: int, length: int) -> list[int]:
    """Tokens none of which is one of the invocation's, or faulty."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 90, (length,), generator=generator).tolist()


def cached(running: Running, name: str) -> int:
    usage = running.result(name)[1].usage
    assert usage is not None
    return int(usage.cached_prompt_tokens)


@BACKENDS
@pytest.mark.parametrize("num_stored", [32, 0])
def test_several_answers_share_the_state_of_their_prompt(
    begin: Start, zoo: Zoo, native: bool, num_stored: int
) -> None:
    """The first computes it; the others go on from the end of its last full page, if one state can
    be stored."""
    running, prompt = begin(native=native, num_stored_states=num_stored), prompt_of(1, 30)
    for number in range(3):
        running.submit(f"{number}", prompt, "plain", group="siblings", max_tokens=12)
    expected = zoo.greedy("plain", prompt, 12)
    for number in range(3):
        assert running.result(f"{number}")[0] == expected
    shared = 28 if num_stored else 0
    assert [cached(running, f"{number}") for number in range(3)] == [0, shared, shared]
    running.check_idle()


@BACKENDS
def test_aloras_go_on_from_the_base_models_states(begin: Start, zoo: Zoo, native: bool) -> None:
    """Up to their activation; behind it the states are theirs. Chunks end anywhere."""
    running = begin(native=native, max_prefill_chunk=7)
    prompt = [*prompt_of(8, 42), *INVOCATION, *prompt_of(9, 10)]
    found = {}
    for name, adapter in (("base", ""), ("first", "alora"), ("again", "alora"), ("plain", "plain")):
        options: dict[str, Any] = {}
        if adapter == "alora":
            options["activation"] = activation_of(prompt, INVOCATION)
        running.submit(name, prompt, adapter, max_tokens=16, **options)
        tokens, _ = running.result(name)
        assert tokens == zoo.greedy(adapter, prompt, 16, guess=tokens), name
        found[name] = cached(running, name)
    # The activation is at 42, and the last full page ends at 52.
    assert found == {"base": 0, "first": 40, "again": 52, "plain": 0}
    running.check_idle()


@BACKENDS
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompts_are_scored(begin: Start, zoo: Zoo, native: bool, chunk: int) -> None:
    """All of their tokens, though their prefix is known; and others share their states."""
    running, prompt = begin(native=native, max_prefill_chunk=chunk), prompt_of(2, 50)
    running.submit("before", prompt, "plain", max_tokens=1)
    running.result("before")
    ask(running, "scored", prompt, "plain", prompt_logprobs=3, max_tokens=2)
    check(scores(running, "scored"), prompt, zoo.logits("plain", prompt, torch.float32), 3)
    assert cached(running, "scored") == 0
    running.submit("after", prompt, "plain", max_tokens=2)
    assert running.result("after")[0] == running.result("scored")[0]
    assert cached(running, "after") == 48
    running.check_idle()


@BACKENDS
def test_tenants_and_salts_share_no_state(begin: Start, zoo: Zoo, native: bool) -> None:
    running, prompt = begin(native=native), prompt_of(3, 30)
    expected = zoo.greedy("plain", prompt, 8)
    for name, seed in (("a", "acme"), ("b", "other"), ("c", "acme salt"), ("d", "acme")):
        running.submit(name, prompt, "plain", max_tokens=8, cache_seed=seed)
        assert running.result(name)[0] == expected
    assert [cached(running, name) for name in "abcd"] == [0, 0, 0, 28]


@BACKENDS
def test_the_prefix_cache_can_be_reset_while_requests_run(
    begin: Start, zoo: Zoo, native: bool
) -> None:
    """They go on from their own state; later ones find none, but for what is stored since then."""
    running, prompt = begin(native=native), prompt_of(4, 30)
    running.submit("running", prompt, "plain", max_tokens=100)
    running.until(lambda: "running" in running.outputs)
    assert running.call(Command.RESET_PREFIX_CACHE).error is None
    running.submit("after", prompt, "plain", max_tokens=8)
    running.submit("again", prompt, "plain", max_tokens=8, group="later")
    tokens = running.result("running")[0]
    assert tokens == zoo.greedy("plain", prompt, 100, guess=tokens)
    assert cached(running, "after") == 0
    assert running.result("after")[0] == running.result("again")[0] == tokens[:8]
    running.submit("last", prompt, "plain", max_tokens=8)
    assert cached(running, "last") == 28
    running.check_idle()


# --- rows that fail -----------------------------------------------------------------------------


@pytest.fixture
def make(zoo: Zoo) -> Iterator[Callable[[], Engine]]:
    before, engines = torch.get_num_threads(), list[Engine]()

    def made() -> Engine:
        engines.append(Engine(zoo.model_dir))
        return engines[-1]

    yield made
    for each in engines:
        each.built.puller.close()
    torch.set_num_threads(before)


def lost(name: str, before: int, behind: int) -> Request:
    prompt = (*prompt_of(before, before), FAULTY, *prompt_of(behind, behind))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    return Request(name, prompt, sampling, arrival_s=time.monotonic())


def fails(inputs: StepInputs, logits: Tensor) -> None:
    """Once all is computed, and all states are written."""
    if FAULTY in inputs.token_ids.tolist():
        raise IndexError("index 2 is out of bounds for dimension 1 with size 2")


def is_not_finite(inputs: StepInputs, logits: Tensor) -> None:
    """The rows' last tokens are the prompts' if these end with the faulty one."""
    for row, token in enumerate(inputs.logit_rows.tolist()):
        if int(inputs.token_ids[token]) == FAULTY:
            logits[row] = float("nan")


@pytest.mark.parametrize("places", [[(0, 0)], [(3, 80), (50, 0), (90, 9)]], ids=str)
def test_rows_that_fail_end_alone(
    make: Callable[[], Engine], places: Sequence[tuple[int, int]]
) -> None:
    """The states of the others, which the failing step has written, are written again."""
    wanted = tokens_of(make().run(requests()))
    engine = faulty_engine(make, fails)
    bad = [lost(f"lost {index}", *place) for index, place in enumerate(places)]
    found = engine.run([*requests(), *bad])
    for each in bad:
        assert isinstance(found.pop(each.request_id)[-1].error, Internal)
    assert tokens_of(found) == wanted
    assert engine.engine.commands.describe().counters["faulty_requests"] == len(bad)
    assert tokens_of(engine.run(requests())) == wanted


def test_a_row_that_is_not_finite_leaves_no_state(make: Callable[[], Engine]) -> None:
    """Nothing of it is found by an equal prompt, which is computed from the start."""
    engine = faulty_engine(make, is_not_finite)
    bad = lost("lost", 40, 0)
    wanted = tokens_of(make().run(requests()))
    found = engine.run([*requests(), bad])
    assert found.pop("lost")[-1].error is not None
    assert tokens_of(found) == wanted
    engine.backend.transformer = engine.backend.transformer.transformer
    again = engine.run([replace(bad, request_id="again")])
    assert again["again"][-1].error is None
    usage = again["again"][-1].usage
    assert usage is not None
    assert usage.cached_prompt_tokens == 0
