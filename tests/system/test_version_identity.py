"""Every token says which version of its adapter has made it, whatever happens to its request:
moves, preemptions, pauses, sleep, cancellations, held pulls. Each is replayed with what it says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from transformers import DynamicCache

from inference_svc.core import (
    EngineConfig,
    FinishReason,
    Request,
    SamplingParams,
    VersionPolicy,
)
from inference_svc.engine.transport.messages import (
    Call,
    Cancel,
    Command,
    LayoutAccepted,
    Message,
    Move,
    Output,
    PauseMode,
    Submit,
)
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import Asleep, StoreUnavailable
from inference_svc.results.base import of_kind
from inference_svc.results.logprobs import TokenLogprobs
from inference_svc.results.scores import Scores
from tests.support.inference.results import wanted_of
from tests.support.models.zoo import AdapterSpec, Zoo, make_zoo, modules_of
from tests.support.pairs import crossed
from tests.support.wait import TIMEOUT_S, until
from tests.system.engines import CompilingStore

VERSIONS = ("r1", "r16", "r33")
"""The adapters of the zoo that one name moves between."""
HYBRID = (
    AdapterSpec("r1", 1, ["in_proj_qkv", "q_proj"]),
    AdapterSpec("r16", 16, modules_of("qwen3_5")),
    AdapterSpec("r33", 33, ["in_proj_z", "in_proj_b", "in_proj_a", "k_proj", "down_proj"]),
)
"""The same of a model with recurrent layers: each changes its states."""
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 4
"""Of four tokens: layers, keys and values, heads, their size, tokens, bytes. The hybrid has half as
many layers with keys and values, twice as large."""
PATHS = [(kind, path) for kind in ("llama", "qwen3_5") for path in ("native", "torch")]
QUICK = (("llama", "native"), ("qwen3_5", "torch"))
TOLERANCE = 1e-3
"""Of log probabilities."""


@dataclass
class Followed:
    """A request, and its tokens, each with the digest and the number of kept tokens that its output
    has."""

    prompt: list[int]
    digest: str
    policy: VersionPolicy
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    made_by: list[tuple[str, int]] = field(default_factory=list)
    scored: list[tuple[int, float, str]] = field(default_factory=list)
    """Position, log probability and digest of what was scored of the prompt."""
    last: Output | None = None

    def add(self, output: Output) -> None:
        assert output.error is None, output.error
        version = output.version
        made_by = (self.digest, 0) if version is None else (version.digest, version.num_kept)
        if version is not None:
            assert self.policy is not VersionPolicy.PIN
            assert not version.num_kept or self.policy is VersionPolicy.FOLLOW_KEEP
        for part in of_kind(output.parts, Scores):
            for place, logprob in enumerate(part.logprobs, part.first_position):
                self.scored.append((place, float(logprob), made_by[0]))
        self.tokens += output.token_ids
        self.logprobs += [each.logprob for each in of_kind(output.parts, TokenLogprobs)]
        self.made_by += [made_by] * len(output.token_ids)
        self.last = output if output.is_last else None


@dataclass
class Engine:
    """An engine whose steps are called by hand, so that everything happens between two."""

    zoo: Zoo
    config: EngineConfig
    store: CompilingStore = field(default_factory=CompilingStore)
    requests: dict[str, Followed] = field(default_factory=dict)
    num_made: int = 0

    def __post_init__(self) -> None:
        self.digests = {name: self.store.register(self.zoo.adapter_dirs[name]) for name in VERSIONS}
        self.names = {digest: name for name, digest in self.digests.items()}
        self.thread = EngineThread(self.config, self.store)
        self.engine = self.thread.built.engine
        self.engine.step([LayoutAccepted(self.store.register_layout(self.thread.layout))])

    def step(self, *messages: Message) -> list[Any]:
        """Returns the replies."""
        outputs, _ = self.engine.step([*self.thread._messages(wait=False), *messages])
        self.engine.check_integrity()
        for output in outputs.outputs:
            self.requests[output.request_id].add(output)
        return list(outputs.replies)

    def call(self, command: Command, **fields: Any) -> Any:
        """Returns the result of a command, after as many steps as it takes."""
        number = next(_NUMBERS)
        replies = self.step(Call(number, command, **fields))
        end_s = time.monotonic() + TIMEOUT_S
        while not any(reply.call_id == number for reply in replies):
            assert time.monotonic() < end_s, f"{command} is not answered"
            replies += self.step()
        (reply,) = (reply for reply in replies if reply.call_id == number)
        assert reply.error is None, reply.error
        return reply.result

    def submit(
        self,
        version: str,
        policy: VersionPolicy,
        prompt: list[int],
        count: int,
        *,
        is_scored: bool = False,
    ) -> str:
        self.num_made += 1
        name, digest = f"{self.num_made}", self.digests[version]
        wanted = wanted_of(logprobs=0, prompt_logprobs=0 if is_scored else None)
        self.requests[name] = Followed(prompt, digest, policy)
        request = Request(
            name,
            tuple(prompt),
            _greedy(count),
            digest,
            wanted=wanted,
            names=(f"acme/{version}@1",),
            arrival_s=time.monotonic(),
            version_policy=policy,
        )
        self.step(Submit(request))
        return name

    def open(self) -> list[str]:
        return [name for name, request in self.requests.items() if request.last is None]

    def move(self, name: str, version: str) -> None:
        if self.requests[name].policy is not VersionPolicy.PIN:
            self.step(Move(name, self.digests[version], f"acme/{version}@2"))

    def load(self, version: str) -> None:
        """Lets no request end before it is there."""
        self.call(Command.PAUSE)
        self.call(Command.LOAD, digest=self.digests[version])
        self.call(Command.RESUME)

    def finish(self) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while self.open():
            assert time.monotonic() < end_s, "requests do not end"
            self.step()
        assert self.engine.scheduler.states.num_used == 0

    def check_tokens(self) -> None:
        """Replays what has ended, and forgets it."""
        for request in self.requests.values():
            assert request.last is not None
            if request.tokens:
                check_tokens(self.zoo, self.names, request)
            if request.scored:
                check_scores(self.zoo, self.names, request)
        self.requests.clear()

    def close(self) -> None:
        self.engine.end_all(StoreUnavailable("the test is over"))
        self.thread.stop()


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


_NUMBERS = itertools.count(1)


def check_tokens(zoo: Zoo, names: dict[str, str], request: Followed) -> None:
    """Asserts that each token has the log probability that the oracle gives it, where the keys and
    values of each token before it are those that, by what the outputs say, some version has
    made; and this version has added the token to recurrent states."""
    made: list[str] = []
    known = list(request.prompt)
    outputs = zip(request.tokens, request.logprobs, request.made_by, strict=True)
    for (digest, num_kept), following in itertools.groupby(outputs, lambda output: output[2]):
        tokens, logprobs, _ = zip(*following, strict=True)
        computed = [*known, *tokens[:-1]]
        made = [*made[:num_kept], *[names[digest]] * (len(computed) - num_kept)]
        expected = _next_logprobs(zoo, computed, tuple(made), len(tokens))
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            assert abs(logprob - expected[place, token]) < TOLERANCE, (len(known) + place, made)
        known += tokens


def check_scores(zoo: Zoo, names: dict[str, str], request: Followed) -> None:
    """Asserts that one version has scored the prompt, each position once, as the oracle does."""
    (digest,) = {digest for _, _, digest in request.scored}
    places = [place for place, _, _ in request.scored]
    assert places == list(range(1, len(places) + 1))
    logits = zoo.logits(names[digest], request.prompt, torch.float32).log_softmax(-1)
    for place, logprob, _ in request.scored:
        assert abs(logprob - logits[place - 1, request.prompt[place]]) < TOLERANCE, place


def _next_logprobs(zoo: Zoo, tokens: list[int], made: tuple[str, ...], count: int) -> torch.Tensor:
    """Returns what follows each of the last `count` tokens, where each token was computed with the
    version at its place, and the last ones with one version."""
    known, start = DynamicCache(config=zoo.reference.config), 0
    for version, places in itertools.groupby(made):
        length = len(list(places))
        part = torch.tensor([tokens[start : start + length]])
        with torch.no_grad():
            zoo.reference.set_adapter(version)
            out = zoo.reference(part, past_key_values=known, use_cache=True)
        start += length
    return out.logits[0, -count:].float().log_softmax(-1)


def make_engine(zoo: Zoo, **changes: Any) -> Engine:
    fields: dict[str, Any] = {
        "max_model_len": 64,
        "max_sequences": 3,
        "max_batch_tokens": 16,
        "max_prefill_chunk": 8,
        "page_size": 4,
        "kv_bytes": 24 * PAGE_BYTES,
        "arena_bytes": 4 << 20,
        "max_loras": 2,
        "num_threads": 1,
        "state_pages": 2,
        "num_stored_states": 4,
    }
    return Engine(zoo, EngineConfig(zoo.model_dir, zoo.kind, **(fields | changes)))


@pytest.fixture(scope="module")
def zoo_of(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Zoo]:
    hybrid = cache(lambda: make_zoo("qwen3_5", tmp_path_factory.mktemp("hybrid"), HYBRID))
    return lambda kind: zoos(kind) if kind == "llama" else hybrid()


@pytest.fixture(params=PATHS, ids=" ".join)
def engine(request: pytest.FixtureRequest, zoo_of: Callable[[str], Zoo]) -> Iterator[Engine]:
    kind, path = request.param
    made = make_engine(zoo_of(kind), native_kernels=path == "native")
    yield made
    made.close()


PROMPT = [5, 9, 77, 30, 21, 64, 8]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_the_replay_notices_another_version(zoo_of: Callable[[str], Zoo], kind: str) -> None:
    """What is wrong by one version, or by one token that was kept, is found."""
    zoo, names = zoo_of(kind), {each: each for each in VERSIONS}
    followed = Followed(PROMPT, "r16", VersionPolicy.FOLLOW_KEEP)
    followed.tokens = zoo.greedy("r16", PROMPT, 12)
    logits = zoo.logits("r16", PROMPT + followed.tokens, torch.float32).log_softmax(-1)
    followed.logprobs = [
        float(logits[len(PROMPT) - 1 + place, token]) for place, token in enumerate(followed.tokens)
    ]
    followed.made_by = [("r16", 0)] * 12
    check_tokens(zoo, names, followed)
    for wrong in [("r33", 0)] * 12, [("r33", 0)] + [("r16", 1)] * 11:
        followed.made_by = wrong
        with pytest.raises(AssertionError):
            check_tokens(zoo, names, followed)


@pytest.mark.parametrize("policy", [VersionPolicy.FOLLOW_KEEP, VersionPolicy.FOLLOW_RECOMPUTE])
def test_a_request_moves_between_two_tokens(engine: Engine, policy: VersionPolicy) -> None:
    engine.load("r33")
    name = engine.submit("r1", policy, PROMPT, 24)
    followed = engine.requests[name]
    while len(followed.tokens) < 8:
        engine.step()
    engine.move(name, "r33")
    engine.finish()
    digests = [digest for digest, _ in followed.made_by]
    moved = digests.index(engine.digests["r33"])
    assert digests == [engine.digests["r1"]] * moved + [engine.digests["r33"]] * (24 - moved)
    kept = {num_kept for _, num_kept in followed.made_by[moved:]}
    is_kept = policy is VersionPolicy.FOLLOW_KEEP
    assert kept == ({len(PROMPT) + moved - 1} if is_kept else {0})
    assert followed.last is not None
    assert followed.last.finish_reason is FinishReason.LENGTH
    engine.check_tokens()


def test_a_pinned_request_ends_on_its_version(engine: Engine) -> None:
    pinned = engine.submit("r1", VersionPolicy.PIN, PROMPT, 12)
    other = engine.submit("r1", VersionPolicy.FOLLOW_KEEP, PROMPT, 12)
    engine.load("r16")
    while len(engine.requests[other].tokens) < 4:
        engine.step()
    engine.move(other, "r16")
    engine.finish()
    assert {digest for digest, _ in engine.requests[pinned].made_by} == {engine.digests["r1"]}
    engine.check_tokens()


def test_until_a_version_is_loaded_requests_go_on_with_the_one_before(engine: Engine) -> None:
    name = engine.submit("r1", VersionPolicy.FOLLOW_RECOMPUTE, PROMPT, 50)
    followed = engine.requests[name]
    while not followed.tokens:
        engine.step()
    engine.store.gate.clear()
    engine.move(name, "r16")
    before = len(followed.tokens)
    for _ in range(5):
        engine.step()
    assert len(followed.tokens) == before + 5
    engine.store.gate.set()
    engine.load("r16")
    engine.finish()
    assert followed.made_by[-1] == (engine.digests["r16"], 0)
    engine.check_tokens()


def test_versions_that_come_faster_than_they_load_are_followed(engine: Engine) -> None:
    """What is nearly loaded is not given up for the next one."""
    engine.load("r1")
    engine.call(Command.PAUSE)
    name = engine.submit("r1", VersionPolicy.FOLLOW_RECOMPUTE, PROMPT, 50)
    engine.store.gate.clear()
    for version in ("r16", "r33", "r16", "r33"):
        engine.move(name, version)
    assert engine.engine.moves.waited_for == [engine.digests["r16"]]
    engine.store.gate.set()
    until(lambda: engine.step() or engine.engine.scheduler.num_moves == 2)
    engine.call(Command.RESUME)
    engine.finish()
    assert {digest for digest, _ in engine.requests[name].made_by} == {engine.digests["r33"]}
    engine.check_tokens()


def test_a_version_that_is_evicted_before_the_move_is_loaded_again(engine: Engine) -> None:
    engine.load("r16")
    name = engine.submit("r1", VersionPolicy.FOLLOW_KEEP, PROMPT, 50)
    while not engine.requests[name].tokens:
        engine.step()
    engine.call(Command.PAUSE)
    # As an aged load would have it.
    residency, digest = engine.engine.residency, engine.digests["r16"]
    residency.device.get(digest).draining = True  # type: ignore[union-attr]
    engine.step(Move(name, digest, "acme/r16@2"))
    residency.tiers.evict(digest)
    until(lambda: engine.step() or engine.engine.scheduler.num_moves == 1)
    engine.call(Command.RESUME)
    engine.finish()
    assert engine.requests[name].made_by[-1][0] == digest
    engine.check_tokens()


def test_a_load_that_sleep_comes_before_is_refused(engine: Engine) -> None:
    engine.store.gate.clear()
    number = next(_NUMBERS)
    engine.step(Call(number, Command.LOAD, digest=engine.digests["r16"]))
    replies = engine.step(Call(next(_NUMBERS), Command.SLEEP))
    until(lambda: replies.extend(engine.step()) or len(replies) == 2)
    errors = {reply.call_id: reply.error for reply in replies}
    assert isinstance(errors[number], Asleep)
    engine.store.gate.set()
    engine.call(Command.WAKE)
    engine.load("r16")


def test_a_version_that_cannot_be_loaded_is_not_moved_to(engine: Engine) -> None:
    name = engine.submit("r1", VersionPolicy.FOLLOW_KEEP, PROMPT, 12)
    while not engine.requests[name].tokens:
        engine.step()
    engine.step(Move(name, "sha256:" + "0" * 64, "acme/gone@2"))
    engine.finish()
    assert {digest for digest, _ in engine.requests[name].made_by} == {engine.digests["r1"]}
    engine.check_tokens()


def test_a_waiting_request_moves_when_its_version_is_gone(engine: Engine) -> None:
    """It would have failed: nothing of it has been computed."""
    gone = "sha256:" + "0" * 64
    name = f"{engine.num_made + 1}"
    engine.num_made += 1
    engine.requests[name] = Followed(PROMPT, gone, VersionPolicy.FOLLOW_KEEP)
    request = Request(
        name,
        tuple(PROMPT),
        _greedy(6),
        gone,
        wanted=wanted_of(logprobs=0),
        version_policy=VersionPolicy.FOLLOW_KEEP,
    )
    engine.step(Submit(request), Move(name, engine.digests["r1"], "acme/r1@2"))
    engine.finish()
    assert engine.requests[name].made_by == [(engine.digests["r1"], 0)] * 6
    engine.check_tokens()


def test_pages_of_two_versions_are_no_prefix(engine: Engine) -> None:
    """What was kept must not be found by a request that runs with one version alone."""
    engine.load("r16")
    name = engine.submit("r1", VersionPolicy.FOLLOW_KEEP, PROMPT, 20)
    while len(engine.requests[name].tokens) < 6:
        engine.step()
    engine.move(name, "r16")
    engine.finish()
    prompt = PROMPT + engine.requests[name].tokens
    for version in ("r16", "r16", "r1"):  # the first makes the pages before those that were kept
        engine.submit(version, VersionPolicy.PIN, prompt, 8)
        engine.finish()
    engine.check_tokens()


Drawn: TypeAlias = tuple[str, VersionPolicy, int, int, int, bool]

REQUESTS = st.tuples(
    st.sampled_from(VERSIONS),
    st.sampled_from(VersionPolicy),
    st.integers(1, 20),  # the prompt's length, and which of two
    st.integers(0, 1),
    st.integers(4, 40),
    st.booleans(),
)


class Versions(RuleBasedStateMachine):
    """Everything at random, between any two steps."""

    zoo: Zoo
    is_native: bool

    @initialize(max_loras=st.integers(2, 3), first=st.lists(REQUESTS, min_size=3, max_size=3))
    def start(self, max_loras: int, first: list[Drawn]) -> None:
        """With two, moves wait for the device's memory; with three they happen at once."""
        self.run = make_engine(self.zoo, native_kernels=self.is_native, max_loras=max_loras)
        for version in VERSIONS:
            self.run.load(version)
        self.is_paused = False
        for each in first:
            self.submit_one(each)
        self.steps(3)

    def submit_one(self, drawn: Drawn) -> None:
        version, policy, length, salt, count, is_scored = drawn
        prompt = [3 + (place * (7 + salt)) % 80 for place in range(length)]
        self.run.submit(version, policy, prompt, count, is_scored=is_scored)

    @rule(drawn=st.lists(REQUESTS, min_size=1, max_size=3))
    def submit(self, drawn: list[Drawn]) -> None:
        for each in drawn:
            self.submit_one(each)

    @rule(which=st.integers(0, 9), version=st.sampled_from(VERSIONS))
    def move(self, which: int, version: str) -> None:
        found = self.run.open()
        if found:
            self.run.move(found[which % len(found)], version)

    @rule(version=st.sampled_from(VERSIONS))
    def move_all(self, version: str) -> None:
        for name in self.run.open():
            self.run.move(name, version)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.run.step()

    @rule()
    def preempt(self) -> None:
        scheduler = self.run.engine.scheduler
        if scheduler.running:
            scheduler.preempt(scheduler.running[-1], time.monotonic())

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        found = self.run.open()
        if found:
            self.run.step(Cancel(found[which % len(found)]))

    @rule(is_open=st.booleans())
    def hold_pulls(self, is_open: bool) -> None:
        (self.run.store.gate.set if is_open else self.run.store.gate.clear)()

    @rule()
    def pause(self) -> None:
        self.run.call(Command.PAUSE, pause_mode=PauseMode.KEEP)
        self.is_paused = True
        numbers = {name: len(each.tokens) for name, each in self.run.requests.items()}
        self.run.step()
        assert numbers == {name: len(each.tokens) for name, each in self.run.requests.items()}

    @rule()
    def resume(self) -> None:
        self.run.call(Command.RESUME)
        self.is_paused = False

    @rule(frees_weights=st.booleans())
    def sleep_and_wake(self, frees_weights: bool) -> None:
        self.run.store.gate.set()
        backend = self.run.engine.runner.backend
        held_bytes = backend.kv_bytes + backend.recurrent_bytes + backend.weights_bytes
        freed_bytes = self.run.call(Command.SLEEP, frees_weights=frees_weights)
        assert backend.kv_bytes == backend.recurrent_bytes == 0
        assert freed_bytes == held_bytes - backend.weights_bytes
        assert (backend.weights_bytes == 0) == frees_weights
        self.run.call(Command.WAKE)
        all_bytes = backend.kv_bytes + backend.recurrent_bytes + backend.weights_bytes
        assert all_bytes == held_bytes

    def teardown(self) -> None:
        self.run.store.gate.set()
        if self.is_paused:
            self.run.call(Command.RESUME)
        self.run.finish()
        self.run.check_tokens()
        self.run.close()


@pytest.mark.parametrize("count", [3, pytest.param(15, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "path"), crossed(QUICK, ("llama", "qwen3_5"), ("native", "torch"))
)
def test_every_token_names_what_made_it(
    zoo_of: Callable[[str], Zoo], kind: str, path: str, count: int
) -> None:
    class Machine(Versions):
        zoo = zoo_of(kind)
        is_native = path == "native"

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )
