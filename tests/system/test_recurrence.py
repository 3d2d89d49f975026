"""A model with recurrent layers, on torch's backend: the state of a sequence is all that it needs,
whatever happens to it. Tokens are transformers' and PEFT's, which compute every prompt whole.

The mixer is a toy: see tests/support/models/decayed_sum.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from inference_svc.backends.base import states_bytes
from inference_svc.backends.torch import TorchFactory
from inference_svc.core import EngineConfig, FinishReason, Request, SamplingParams
from inference_svc.engine.control.life_cycle import Sleep
from inference_svc.engine.transport.messages import (
    Call,
    Cancel,
    Command,
    LayoutAccepted,
    Message,
    Output,
    Submit,
)
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import UnsupportedModel
from inference_svc.model.inputs import StepInputs
from tests.support.models.decayed_sum import VOCAB_SIZE, make_oracle, register, save_oracle
from tests.support.wait import until
from tests.system.engines import CompilingStore

NUM_TOKENS = 12
PAGE_SIZE = 4
STATE_PAGES = 2
BORDER = STATE_PAGES * PAGE_SIZE
ADAPTERS = {"one": ["value"], "other": ["out", "q_proj", "down_proj"]}
"""Adapters of the recurrent layers' projections, and of others."""


@dataclass
class Oracle:
    """The model, and its adapters, in transformers and PEFT; "" is the base model."""

    folder: Path
    models: dict[str, Any]
    _known: dict[tuple[str, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def tokens(self, adapter: str, prompt: Sequence[int], count: int) -> list[int]:
        key = adapter, tuple(prompt)
        token_ids = [*prompt, *self._known.get(key, [])]
        with torch.no_grad():
            while len(token_ids) < len(prompt) + count:
                logits = self.models[adapter](torch.tensor([token_ids])).logits[0, -1]
                token_ids.append(int(logits.argmax()))
        self._known[key] = token_ids[len(prompt) :]
        return self._known[key][:count]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("recurrence")
    save_oracle(make_oracle(), folder / "model")
    models = {"": make_oracle()}
    for name, targets in ADAPTERS.items():
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
        models[name] = peft.get_peft_model(make_oracle(), config).eval()
        torch.manual_seed(len(models))
        for parameter_name, parameter in models[name].named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.3)
        models[name].save_pretrained(folder / name)
    return Oracle(folder, models)


@dataclass(eq=False)
class Engine:
    """An engine whose steps are called by hand."""

    oracle: Oracle
    changes: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, tuple[str, list[int], int]] = field(default_factory=dict)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {
            "max_model_len": 256,
            "max_sequences": 4,
            "max_batch_tokens": 64,
            "page_size": PAGE_SIZE,
            "state_pages": STATE_PAGES,
            "kv_bytes": 1 << 20,
            "arena_bytes": 1 << 20,
            "native_kernels": False,
            "num_threads": 1,
        }
        self.config = EngineConfig(self.oracle.folder / "model", "model", **(fields | self.changes))
        self.store = CompilingStore()
        self.digests = {name: self.store.register(self.oracle.folder / name) for name in ADAPTERS}
        self.thread = EngineThread(self.config, self.store)
        self.engine = self.thread.built.engine
        self.scheduler = self.engine.scheduler
        self.backend: Any = self.engine.runner.backend
        self.engine.step([LayoutAccepted(self.store.register_layout(self.thread.layout))])

    def step(self, *messages: Message) -> list[Any]:
        """Returns the replies."""
        outputs, _ = self.engine.step([*self.thread._messages(wait=False), *messages])
        self.engine.check_integrity()
        for output in outputs.outputs:
            assert output.error is None, output.error
            self.outputs.setdefault(output.request_id, []).append(output)
        return list(outputs.replies)

    def call(self, command: Command, **fields: Any) -> Any:
        """Returns the result of a command, after as many steps as it takes."""
        number = next(self.numbers)
        replies = self.step(Call(number, command, **fields))
        until(lambda: any(r.call_id == number for r in replies) or replies.extend(self.step()))
        (reply,) = (reply for reply in replies if reply.call_id == number)
        assert reply.error is None, reply.error
        return reply.result

    def submit(self, prompt: Sequence[int], adapter: str = "", count: int = NUM_TOKENS) -> str:
        name = f"{next(self.numbers)}"
        self.prompts[name] = adapter, list(prompt), count
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        key, now_s = self.digests.get(adapter, ""), time.monotonic()
        self.step(Submit(Request(name, tuple(prompt), sampling, key, arrival_s=now_s)))
        return name

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, ()) for token in output.token_ids]

    def check(self, name: str) -> None:
        """Asserts that a request's tokens so far are the oracle's."""
        adapter, prompt, count = self.prompts[name]
        found = self.tokens(name)
        assert found == self.oracle.tokens(adapter, prompt, count)[: len(found)]

    def finish(self) -> None:
        """Asserts that all requests get all of their tokens, but for cancelled ones, and that
        nothing is held then."""
        until(lambda: not self.engine.sequences or self.step())
        for name, (_, _, count) in self.prompts.items():
            self.check(name)
            is_cancelled = self.outputs[name][-1].finish_reason is FinishReason.ABORTED
            assert is_cancelled or len(self.tokens(name)) == count
        assert self.scheduler.states.num_used == 0

    def num_cached(self, name: str) -> int:
        usage = self.outputs[name][-1].usage
        assert usage is not None
        return usage.cached_prompt_tokens


@pytest.fixture
def start(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    register(monkeypatch)
    before, made = torch.get_num_threads(), list[Engine]()

    def make(**changes: Any) -> Engine:
        made.append(Engine(oracle, changes))
        return made[-1]

    yield make
    for each in made:
        each.thread.stop()
    torch.set_num_threads(before)


def prompt_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_prompts_in_chunks(start: Callable[..., Engine], chunk: int) -> None:
    """Of any size, with decoding rows beside them, and every adapter."""
    engine = start(max_prefill_chunk=chunk)
    for seed, length in enumerate((1, 9, 30, 70)):
        for adapter in ("", *ADAPTERS):
            engine.submit(prompt_of(seed, length), adapter)
    engine.finish()
    found = {adapter: engine.tokens(name) for name, (adapter, _, _) in engine.prompts.items()}
    assert len(set(map(tuple, found.values()))) == len(found), "an adapter changes nothing"


def test_a_prefix_goes_on_at_the_last_stored_border(start: Callable[..., Engine]) -> None:
    engine, prompt = start(), prompt_of(3, 30)
    first = engine.submit(prompt)
    engine.finish()
    again, longer = engine.submit(prompt), engine.submit([*prompt, *engine.tokens(first), 5])
    shorter, adapted = engine.submit(prompt[:13]), engine.submit(prompt, "one")
    engine.finish()
    assert [engine.num_cached(name) for name in (first, again, longer, shorter, adapted)] == [
        0,
        28,  # where the prompt's last full page ends
        5 * BORDER,
        BORDER,
        0,
    ]
    with_adapter = engine.submit(prompt, "one")
    engine.finish()
    assert engine.num_cached(with_adapter) == 28


def test_stored_states_are_evicted_before_running_ones(start: Callable[..., Engine]) -> None:
    engine = start(num_stored_states=2)
    prompts = [prompt_of(seed, 40) for seed in range(6)]
    for prompt in (*prompts, *prompts):
        engine.submit(prompt)
    engine.finish()
    assert engine.scheduler.states.recurrent is not None
    pool = engine.scheduler.states.recurrent.pool
    assert pool.num_evictions > 0
    assert pool.num_units == 2 * 4 + 2 + 1


def test_preempted_sequences_go_on(start: Callable[..., Engine]) -> None:
    """Pages for two of them: the others are computed again, from stored borders where there are
    some."""
    page_bytes = 2 * 2 * 2 * 8 * 4 * PAGE_SIZE
    engine = start(kv_bytes=page_bytes * 24, max_model_len=90)
    for seed in range(6):
        engine.submit(prompt_of(seed, 30), ("", *ADAPTERS)[seed % 3], count=30)
    engine.finish()
    assert engine.scheduler.num_preemptions > 0


def test_a_cancelled_sequence_leaves_nothing(start: Callable[..., Engine]) -> None:
    engine = start(max_prefill_chunk=7)
    others = [engine.submit(prompt_of(seed, 20)) for seed in range(3)]
    cancelled = engine.submit(prompt_of(9, 40))
    for _ in range(3):
        engine.step()
    engine.step(Cancel(cancelled))
    engine.finish()
    assert all(len(engine.tokens(name)) == NUM_TOKENS for name in others)


@pytest.mark.parametrize("frees_weights", [False, True])
def test_sleep_frees_states_and_sequences_go_on(
    start: Callable[..., Engine], frees_weights: bool
) -> None:
    engine = start()
    names = [engine.submit(prompt_of(seed, 30), "one", count=20) for seed in range(3)]
    until(lambda: len(engine.scheduler.running) == 3 or engine.step())
    engine.step()
    backend, memory = engine.backend, engine.engine.commands.describe().memory
    used, held_bytes = memory["recurrent_states"]
    assert 0 < used < held_bytes == backend.recurrent_bytes
    assert held_bytes == states_bytes(engine.config, backend._decoder)
    held_bytes += backend.kv_bytes + (backend.weights_bytes if frees_weights else 0)
    freed_bytes = engine.call(Command.SLEEP, frees_weights=frees_weights)
    assert freed_bytes == held_bytes
    assert engine.backend.recurrent_bytes == engine.scheduler.states.num_known == 0
    engine.call(Command.WAKE)
    assert engine.engine.commands.life_cycle.sleep is Sleep.AWAKE
    again = engine.submit(prompt_of(0, 30), "one")
    engine.finish()
    assert all(len(engine.tokens(name)) == 20 for name in names)
    assert engine.tokens(again)


@dataclass
class Scarce:
    """A model on a device that refuses some steps, each after it has computed all of it."""

    transformer: Any
    refuses: Callable[[StepInputs], bool]
    num_refused: int = 0

    @property
    def weights(self) -> Any:
        return self.transformer.weights

    def forward(self, inputs: StepInputs, *others: Any) -> Any:
        logits = self.transformer.forward(inputs, *others)
        if self.refuses(inputs):
            self.num_refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("most", [1, 3, 11])
def test_steps_are_computed_again_in_parts(
    start: Callable[..., Engine], most: int, prefix_cache: bool
) -> None:
    """After they have written their states: rows of prompts are cut, and the parts that go on with
    one are refused, too."""
    engine, attempts = start(prefix_cache=prefix_cache), itertools.count()
    num_continued = 0

    def refuses(inputs: StepInputs) -> bool:
        nonlocal num_continued
        plan, count = inputs.recurrent, len(inputs.token_ids)
        assert plan is not None
        if count <= most and any(each.read == plan.states.spare for each in plan.segments):
            num_continued += 1
            return next(attempts) % 2 == 0 and count > 1
        return count > most

    scarce = engine.backend.transformer = Scarce(engine.backend.transformer, refuses)
    for seed, length in enumerate((30, 61, 9)):
        engine.submit(prompt_of(seed, length), ("", *ADAPTERS)[seed])
    engine.finish()
    assert scarce.num_refused >= 3
    assert num_continued >= 3


@pytest.mark.parametrize("native_kernels", [False, True])
def test_backends_without_the_mixer_refuse_it(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, native_kernels: bool
) -> None:
    monkeypatch.setattr(TorchFactory, "features", TorchFactory.features - {"decayed_sum"})
    with pytest.raises(UnsupportedModel, match="backend does not compute decayed_sum"):
        start(native_kernels=native_kernels)


class Machine(RuleBasedStateMachine):
    """Requests with equal prefixes, and everything that happens to them."""

    make: Callable[..., Engine]

    def __init__(self) -> None:
        super().__init__()
        self.engine = type(self).make(num_stored_states=3, max_prefill_chunk=9)

    @rule(
        seed=st.integers(0, 1),
        length=st.integers(1, 40),
        adapter=st.sampled_from(["", *ADAPTERS]),
        count=st.integers(1, 20),
    )
    def submit(self, seed: int, length: int, adapter: str, count: int) -> None:
        if len(self.engine.engine.sequences) < 8:
            self.engine.submit(prompt_of(seed, 40)[:length], adapter, count)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    # Numbers are drawn, not sequences: when an adapter arrives, and who runs then, is not repeated.
    @rule(which=st.integers(0, 9))
    def preempt(self, which: int) -> None:
        if running := self.engine.scheduler.running:
            self.engine.scheduler.preempt(running[which % len(running)], time.monotonic())
            self.engine.engine.check_integrity()

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        if names := sorted(self.engine.engine.sequences):
            self.engine.step(Cancel(names[which % len(names)]))

    @rule()
    def sleep(self) -> None:
        self.engine.call(Command.SLEEP, frees_weights=False)
        self.engine.call(Command.WAKE)

    @rule()
    def forget(self) -> None:
        self.engine.scheduler.states.forget_prefixes()

    def teardown(self) -> None:
        self.engine.finish()
        self.engine.thread.stop()


@pytest.mark.parametrize(
    "num_examples", [8, pytest.param(150, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_whatever_happens(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, num_examples: int
) -> None:
    register(monkeypatch)
    monkeypatch.setattr(
        Machine, "make", staticmethod(lambda **changes: Engine(oracle, changes)), raising=False
    )
    quick = settings(max_examples=num_examples, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Machine, settings=quick)
