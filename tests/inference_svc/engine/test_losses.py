"""Requests that cannot be computed end alone: values that are not finite, and steps that fail."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference_svc.adapters.memory.tiers import TableClear
from inference_svc.core import Batch, Part, Request, SamplingParams, Sequence, Sum
from inference_svc.engine.compute import losses as losses_module
from inference_svc.engine.compute.losses import Loss, Losses
from inference_svc.engine.compute.penalties import TokenCounts
from inference_svc.engine.transport.messages import Output
from inference_svc.errors import NotFinite, OutOfDeviceMemory
from inference_svc.model.inputs import StepInputs
from servicekit.errors import Internal
from tests.support.inference.results import asking
from tests.support.inference.stepped import (
    PROMPT_TOKENS,
    Engine,
    faulty_engine,
    requests,
    tokens_of,
)

FAULTY = 62
"""A token that no other prompt has; nor do answers, which `sound` proves."""


def fails(inputs: StepInputs, logits: Tensor) -> None:
    if FAULTY in inputs.token_ids.tolist():
        raise IndexError("index 2 is out of bounds for dimension 1 with size 2")


def overflows(inputs: StepInputs, logits: Tensor) -> None:
    """The logits of each row behind such a token become no numbers."""
    start = 0
    for row, end in enumerate((inputs.logit_rows + 1).tolist()):
        if FAULTY in inputs.token_ids[start:end].tolist():
            logits[row] = math.nan
        start = end


def lost(name: str, before: int, behind: int = 0) -> Request:
    """A prompt with one such token, and so many others on each side of it."""
    others = [token % PROMPT_TOKENS for token in range(before + behind)]
    prompt = (*others[:before], FAULTY, *others[before:])
    return Request(name, prompt, SamplingParams(max_tokens=4), arrival_s=time.monotonic())


@pytest.fixture(scope="module")
def sound(model_folder: Path) -> dict[str, list[int]]:
    """The tokens of sound requests."""
    engine = Engine(model_folder)
    found = tokens_of(engine.run(requests()))
    engine.built.puller.close()
    assert all(FAULTY not in tokens for tokens in found.values())
    return found


def error_of(found: dict[str, list[Output]], name: str) -> Exception | None:
    return found.pop(name)[-1].error


@pytest.mark.slow
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=4))
def test_rows_that_fail_end_alone(
    make: Callable[[], Engine], sound: dict[str, list[int]], places: list[tuple[int, int]]
) -> None:
    engine = faulty_engine(make, fails)
    bad = [lost(f"lost {index}", *place) for index, place in enumerate(places)]
    found = engine.run([*bad, *requests()])
    for each in bad:
        assert isinstance(error_of(found, each.request_id), Internal)
    assert tokens_of(found) == sound
    assert engine.engine.commands.describe().counters["faulty_requests"] == len(bad)
    assert tokens_of(engine.run(requests())) == sound


@dataclass
class Stage:
    """Raises at one stage of each step that has a row with such a token, once it is computed."""

    engine: Engine
    patch: pytest.MonkeyPatch
    is_faulty: bool = False
    num_raised: int = 0

    def __post_init__(self) -> None:
        backend, prepare = self.engine.backend, self.engine.backend.prepare

        def noting(batch: Batch) -> Any:
            prompts = (row.sequence.request.prompt_token_ids for row in batch.rows)
            self.is_faulty = any(FAULTY in prompt for prompt in prompts)
            return prepare(batch)

        self.patch.setattr(backend, "prepare", noting)

    def fail(self) -> None:
        if self.is_faulty:
            self.num_raised += 1
            raise IndexError("index 2 is out of bounds for dimension 1 with size 2")

    def at(self, owner: object, name: str) -> None:
        """Fails behind a function."""
        function = getattr(owner, name)

        def failing(*arguments: Any) -> Any:
            result = function(*arguments)
            self.fail()
            return result

        self.patch.setattr(owner, name, failing)

    def half_way_through_counts(self) -> None:
        """Fails after a sequence's new tokens are counted, before it is noted which ones were."""
        update = TokenCounts.update

        def failing(counts: TokenCounts) -> Any:
            num_seen = counts.num_seen
            result = update(counts)
            is_new = num_seen < counts.num_seen
            if is_new or FAULTY in counts._sequence.request.prompt_token_ids:
                if self.is_faulty:
                    counts.num_seen = num_seen
                self.fail()
            return result

        self.patch.setattr(TokenCounts, "update", failing)

    def while_scoring(self) -> None:
        score = self.engine.backend.score

        def failing(inputs: Any) -> Any:
            yield from score(inputs)
            self.fail()

        self.patch.setattr(self.engine.backend, "score", failing)


STAGES: dict[str, Callable[[Stage], None]] = {
    "prepare": lambda stage: stage.at(stage.engine.backend, "prepare"),
    "forward": lambda stage: stage.at(stage.engine.backend, "forward"),
    "sampler": lambda stage: stage.at(stage.engine.engine.runner.sampler, "sample"),
    "penalties": Stage.half_way_through_counts,
    "score": Stage.while_scoring,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_row_ends_alone_wherever_it_fails(
    make: Callable[[], Engine], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of other answers. Tokens of neighbours are counted once."""
    counted = [
        Request(
            f"counted {number}",
            (number, 2, 3),
            SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, frequency_penalty=0.05),
            arrival_s=time.monotonic(),
        )
        for number in range(2)
    ]
    wanted = tokens_of(make().run([*counted, *requests()]))
    engine = make()
    failing = Stage(engine, monkeypatch)
    STAGES[stage](failing)
    asked = asking({"max_tokens": 4, "frequency_penalty": 0.5, "prompt_logprobs": 0})
    bad = [replace(lost(f"lost {number}", number), **asked) for number in range(2)]
    found = engine.run([*counted, *requests()], later=bad, num_before=8)
    assert all(isinstance(error_of(found, each.request_id), Internal) for each in bad)
    assert tokens_of(found) == wanted
    assert failing.num_raised >= len(bad)


def test_the_log_says_once_why(
    make: Callable[[], Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Not at each half of a step, and not for each request that ends alike."""
    engine = faulty_engine(make, fails)
    with caplog.at_level(logging.WARNING):
        engine.run([lost(f"lost {number}", number) for number in range(4)] + requests())
    assert "out of bounds" in caplog.text
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert 1 <= len(tracebacks) <= 4, "one for each step that fails"
    ended = [record for record in caplog.records if "a request ends" in record.message]
    assert [record.__dict__["adapter"] for record in ended] == [""]


def test_the_log_counts_requests_it_has_no_line_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Losses("float32")
    digest = f"sha256:{1:064}"
    mine, other = (
        Sequence(Request("r", (1,), SamplingParams(), key=each, names=("acme/a@3",)))
        for each in (digest, "")
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            found.add(mine, Loss.FAULT)
        found.add(other, Loss.FAULT)
        monkeypatch.setattr(losses_module, "QUIET_S", 0.0)
        found.add(mine, Loss.FAULT)
    assert [record.__dict__["num_others"] for record in caplog.records] == [0, 0, 4]
    assert found.counts[Loss.FAULT] == 7


def test_a_fault_names_the_adapter() -> None:
    request = Request("r", (1,), SamplingParams(), key=f"sha256:{1:064}", names=("acme/a@3",))
    error = Losses("float32").add(Sequence(request), Loss.FAULT)
    assert "adapter acme/a@3" in error.message


def test_marks_are_of_each_part_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They belong to adapters, which may be evicted and loaded again."""
    monkeypatch.setattr(losses_module, "MAX_MARKED", 2)
    found = Losses("float32")
    digests = [f"sha256:{number:064}" for number in range(3)]
    summed = Sum((Part(digests[0]), Part(digests[1], 0.5)))
    for key in (summed, digests[0], ""):
        found.add(Sequence(Request("r", (1,), SamplingParams(), key)), Loss.NOT_FINITE)
    found.add(Sequence(Request("r", (1,), SamplingParams(), digests[0])), Loss.FAULT)
    assert [found.num_not_finite(digest) for digest in digests] == [2, 1, 0]
    found.add_refused(digests[2])
    assert [found.num_not_finite(digest) for digest in digests] == [2, 0, 1]
    assert (found.num_refused, found.counts[Loss.NOT_FINITE]) == (1, 3)


@pytest.mark.parametrize("num_lacking", [1, 2])
def test_memory_may_lack_once_for_a_residency_change(
    make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch, num_lacking: int
) -> None:
    """It is made after what is unused is freed; a device without any memory ends the engine."""
    runner = make().engine.runner
    table, made = runner.backend.arena.table, list[int]()
    left = [torch.OutOfMemoryError("CUDA out of memory")] * num_lacking
    clear = table.clear_row

    def scarce(slot: int) -> None:
        if left:
            raise left.pop()
        made.append(slot)
        clear(slot)

    monkeypatch.setattr(type(table), "clear_row", lambda table, slot: scarce(slot))
    batch = Batch((), (TableClear(1), TableClear(0)))
    if num_lacking == 1:
        runner.run(batch)
        assert made == [1, 0]
    else:
        with pytest.raises(torch.OutOfMemoryError):
            runner.run(batch)


def test_requests_that_all_fail_do_not_end_the_engine(
    make: Callable[[], Engine], sound: dict[str, list[int]]
) -> None:
    """A row of the base model in their place shows that it is not the device."""
    engine = faulty_engine(make, fails)
    for _ in range(3):
        found = engine.run([lost("first", 0), lost("second", 5, 9)])
        assert all(isinstance(error_of(found, name), Internal) for name in list(found))
    assert tokens_of(engine.run(requests())) == sound


def test_a_broken_device_ends_the_engine(make: Callable[[], Engine]) -> None:
    def broken(inputs: StepInputs, logits: Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = faulty_engine(make, broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.run(requests())


def test_a_step_that_fails_may_lack_memory_too(
    make: Callable[[], Engine], sound: dict[str, list[int]]
) -> None:

    def scarce(inputs: StepInputs, logits: Tensor) -> None:
        fails(inputs, logits)
        if len(inputs.token_ids) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine = faulty_engine(make, scarce)
    found = engine.run([lost("lost", 50, 3), *requests()])
    assert isinstance(error_of(found, "lost"), Internal)
    assert tokens_of(found) == sound
    assert engine.limit.num_out_of_memory > 0


def test_memory_may_lack_for_the_row_that_shows_whether_it_is_the_device(
    make: Callable[[], Engine], sound: dict[str, list[int]]
) -> None:
    """The row is tried again, alone: it neither ends the engine, nor others."""
    num_lacking = 0

    def scarce(inputs: StepInputs, logits: Tensor) -> None:
        nonlocal num_lacking
        fails(inputs, logits)
        if inputs.token_ids.tolist() == [0] and num_lacking < 3:
            num_lacking += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine = faulty_engine(make, scarce)
    found = engine.run([lost("lost", 3), *requests()])
    assert isinstance(error_of(found, "lost"), Internal | OutOfDeviceMemory)
    assert tokens_of(found) == sound
    assert engine.limit.num_out_of_memory == num_lacking == 3


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (10, 200), (100, 30), (200, 0)])
def test_rows_that_overflow_end_alone(
    make: Callable[[], Engine], sound: dict[str, list[int]], before: int, behind: int
) -> None:
    """Also in the middle of a prompt, whose pages are then never shared."""
    engine = faulty_engine(make, overflows)
    found = engine.run([lost("lost", before, behind), *requests()])
    error = error_of(found, "lost")
    assert isinstance(error, NotFinite)
    assert "float32" in error.message
    assert tokens_of(found) == sound
    assert engine.engine.commands.describe().counters["not_finite_requests"] == 1


def test_pages_of_rows_that_overflow_are_not_shared(make: Callable[[], Engine]) -> None:
    engine, pages = faulty_engine(make, overflows), 64 // 4
    engine.run([lost("lost", 70, 60)])
    known = engine.engine.scheduler.states.num_known
    assert known == pages, "those of the first step alone, before the token"


def test_an_overflow_names_the_adapter() -> None:
    losses = Losses("float16")
    digests = [f"sha256:{number:064}" for number in range(2)]
    summed = Sum(tuple(map(Part, digests)))
    for key, names, words in (
        ("", (), "prompt"),
        (digests[0], ("acme/a@3",), "acme/a@3"),
        (summed, ("acme/a@3", "acme/b@1"), "the sum of acme/a@3 + acme/b@1"),
    ):
        request = Request("r", (1,), SamplingParams(), key, names=names)
        error = losses.add(Sequence(request), Loss.NOT_FINITE)
        assert words in error.message
        assert "float16" in error.message
        assert error.subject == ("adapter" if key else "model")
