"""A device without memory for a whole step: it is computed in parts, and gives the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_svc.core import BatchRow, Request, SamplingParams, Sequence
from inference_svc.engine.policy.memory_backoff import GOOD_STEPS, StepLimit
from inference_svc.engine.policy.prices import FREE
from inference_svc.engine.transport.messages import Output
from inference_svc.errors import OutOfDeviceMemory
from inference_svc.model.inputs import StepInputs
from inference_svc.results.logprobs import TokenLogprobs
from inference_svc.results.scores import Scores
from tests.support.inference.results import asking, parts_of
from tests.support.inference.stepped import MAX_TOKENS, PROMPT_TOKENS, Engine, requests, tokens_of


@dataclass
class Scarce:
    """A model on a device that `suffices` for some steps only; half of the others are computed
    before that shows."""

    transformer: Any
    suffices: Callable[[StepInputs], bool]
    num_refused: int = 0

    @property
    def weights(self) -> Any:
        return self.transformer.weights

    def forward(self, inputs: StepInputs, *others: Any) -> Tensor:
        if self.suffices(inputs):
            return self.transformer.forward(inputs, *others)
        self.num_refused += 1
        if self.num_refused % 2:
            self.transformer.forward(inputs, *others)
        raise torch.OutOfMemoryError("CUDA out of memory")


def make_scarce(engine: Engine, suffices: Callable[[StepInputs], bool]) -> Scarce:
    engine.backend.transformer = Scarce(engine.backend.transformer, suffices)
    return engine.backend.transformer


@pytest.fixture(scope="module")
def wanted(model_folder: Path) -> dict[str, list[Output]]:
    """What requests get where memory suffices."""
    plenty = Engine(model_folder)
    found = plenty.run(requests())
    assert plenty.engine.commands.describe().counters["step_out_of_memory"] == 0
    plenty.built.puller.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3, 10, 40])
def test_all_requests_get_the_tokens_that_they_would_have(
    make: Callable[[], Engine], wanted: dict[str, list[Output]], most: int
) -> None:
    scarce = make()
    model = make_scarce(scarce, lambda inputs: len(inputs.token_ids) <= most)
    found = scarce.run(requests())
    assert tokens_of(found) == tokens_of(wanted)
    explained = [parts_of(outputs["3"], TokenLogprobs) for outputs in (wanted, found)]
    assert len(explained[0]) == len(tokens_of(wanted)["3"])
    for one, other in zip(*explained, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    status = scarce.engine.commands.describe()
    assert status.counters["step_out_of_memory"] == model.num_refused > 0
    assert status.gauges["step_token_limit"] == scarce.limit.tokens < MAX_TOKENS


def test_scores_of_a_prompt_that_is_cut_are_whole(
    make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of its row has scores of its own."""
    scarce = make()
    scarce.engine.scheduler.prices = FREE
    forward = type(scarce.backend).forward
    most = 16

    def forward_few(self: Any, inputs: Any) -> Any:
        if len(inputs.step.token_ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, inputs)

    monkeypatch.setattr(type(scarce.backend), "forward", forward_few)
    prompt = tuple(range(MAX_TOKENS // 2))
    assert len(prompt) > most
    options = asking({"max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 1})
    found = scarce.run([Request("scored", prompt, arrival_s=time.monotonic(), **options)])
    scores = parts_of(found["scored"], Scores)
    assert sum(each.num_tokens for each in scores) == len(prompt) - 1
    assert scarce.limit.num_out_of_memory > 0


def test_choosing_tokens_may_run_out_too(
    make: Callable[[], Engine],
    wanted: dict[str, list[Output]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After it has changed the logits: they are computed again."""
    scarce = make()
    sample = type(scarce.engine.runner.sampler).sample

    def sample_few(self: Any, logits: Tensor, sequences: list[Sequence], argmax: Any) -> Any:
        sampled = sample(self, logits, sequences, argmax)
        if len(sequences) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sampled

    monkeypatch.setattr(type(scarce.engine.runner.sampler), "sample", sample_few)
    assert tokens_of(scarce.run(requests())) == tokens_of(wanted)
    assert scarce.limit.num_out_of_memory > 0


@pytest.mark.slow
def test_the_limit_recovers(make: Callable[[], Engine]) -> None:
    engine = make()
    model = make_scarce(engine, lambda inputs: len(inputs.token_ids) <= 10)
    engine.run(requests())
    assert engine.limit.tokens < MAX_TOKENS
    model.suffices = lambda inputs: True
    before = engine.limit.num_out_of_memory
    for _ in range(60):
        if engine.limit.tokens == MAX_TOKENS:
            break
        engine.run(requests())
    assert engine.limit.tokens == MAX_TOKENS
    assert engine.limit.num_out_of_memory == before


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_a_request_that_never_fits_ends_alone(make: Callable[[], Engine], num_tokens: int) -> None:
    """The device has no memory for a token that no other request has."""
    plenty, scarce = make(), make()
    others = [each for each in requests() if each.request_id in "03"]
    wanted = tokens_of(plenty.run(others))
    seen = {token for tokens in wanted.values() for token in tokens}
    bad = min(set(range(PROMPT_TOKENS, 64)) - seen)
    make_scarce(scarce, lambda inputs: bad not in inputs.token_ids.tolist())
    prompt = (*range(num_tokens - 1), bad, *range(num_tokens))
    lost = Request("lost", prompt, SamplingParams(), arrival_s=time.monotonic())
    found = scarce.run([lost, *others])
    [last] = found.pop("lost")
    assert isinstance(last.error, OutOfDeviceMemory)
    assert last.error.retry_after_s > 0
    assert "--kv-memory" in str(last.error)
    assert tokens_of(found) == wanted


# --- the limit ----------------------------------------------------------------------------------


def rows_of(*counts: int) -> tuple[BatchRow, ...]:
    rows = []
    for index, count in enumerate(counts):
        sequence = Sequence(Request(str(index), (1,) * (5 + count), SamplingParams()))
        rows.append(BatchRow(sequence, 5, count, samples=True))
    return tuple(rows)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 9, 100])
def test_parts_are_the_whole(tokens: int) -> None:
    rows = rows_of(1, 1, 7, 1, 4)
    limit = StepLimit(200)
    limit.ran_out(2 * tokens)
    left, parts = rows, list[tuple[BatchRow, ...]]()
    while left:
        part, left = limit.cut(left)
        parts.append(part)
    assert all(sum(row.num_tokens for row in part) == tokens for part in parts[:-1])
    found: dict[str, list[BatchRow]] = {}
    for row in (row for part in parts for row in part):
        found.setdefault(row.sequence.request.request_id, []).append(row)
    for row in rows:
        pieces = found[row.sequence.request.request_id]
        places = [range(p.start, p.start + p.num_tokens) for p in pieces]
        assert [at for place in places for at in place] == list(range(5, 5 + row.num_tokens))
        assert [piece.samples for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_without_a_shortage_nothing_is_cut() -> None:
    limit, rows = StepLimit(3), rows_of(1, 1, 7)
    assert limit.cut(rows) == (rows, ())


def test_the_limit_is_halved_and_doubled() -> None:
    limit = StepLimit(100)
    limit.ran_out(60)
    limit.ran_out(30)
    assert (limit.tokens, limit.num_out_of_memory) == (15, 2)
    for expected in (30, 60, 100, 100):
        for _ in range(GOOD_STEPS):
            limit.succeeded()
        assert limit.tokens == expected
    limit.ran_out(1)
    assert limit.tokens == 1


def test_steps_of_decodes_are_cut_only_if_they_are_too_much() -> None:
    limit = StepLimit(100, max_rows=30)
    for _ in range(5):
        limit.ran_out(limit.tokens if limit.tokens > 30 else 31)
        assert limit.tokens >= 30
    limit.ran_out(20)
    assert limit.tokens == 10
