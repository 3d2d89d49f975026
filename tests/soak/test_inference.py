"""Some seconds of the engine's endurance test; `make soak` has ten minutes of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bench.engine import TRANSPORTS, Track
from bench.models import Prepared, prepare
from inference_svc.core import FinishReason
from inference_svc.errors import AdapterUnavailable, QueueFull
from tests.soak.inference import NUM_SAMPLES, WARM_UP_SHARE, Soak, SoakRequest, soak
from tests.soak.kinds import ADDED, ALORA, BASE, PLAIN, SUM, Kinds
from tests.support import forks


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Prepared:
    return prepare("bench-tiny", 1, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_under_cancels_and_deadlines_holds_nothing(prepared, transport) -> None:
    with forks.forked_engines():
        done = soak(prepared, num_adapters=60, seconds=1.5, seed=5, threads=0, transport=transport)
    assert " 0 requests" not in f" {done}"
    assert " dora" in done


def test_what_is_drawn_is_of_every_kind() -> None:
    chosen, digests = random.Random(0), [f"sha256:{number}" for number in range(12)]
    kinds = Kinds([PLAIN, ALORA, ADDED], digests, 512)
    drawn = [kinds.draw(chosen, number % 12, [7] * 9) for number in range(400)]
    assert {each.kind for each in drawn} == {BASE, SUM, PLAIN, ALORA, ADDED}
    for each in drawn:
        assert (max(each.prompt) >= 512) == (each.kind == ADDED)
        assert each.activation == 0 or each.kind == ALORA
        if each.kind == SUM:
            parts = each.key.parts
            assert {part.digest for part in parts}.isdisjoint(digests[1::3]), "an aLoRA"
            assert sum(part.digest in digests[2::3] for part in parts) <= 1
            assert len({part.digest for part in parts}) == len(parts) >= 2


@pytest.mark.parametrize(
    ("asked", "is_wrong"),
    [
        (SoakRequest(Track(0.0, finish_reason=FinishReason.ABORTED), 4, False), True),
        (SoakRequest(Track(0.0, finish_reason=FinishReason.ABORTED), 4, True), False),
        (SoakRequest(Track(0.0, finish_reason=FinishReason.ABORTED), 4, False, True), False),
        (SoakRequest(Track(0.0, error=QueueFull("full")), 4, False), True),
        (SoakRequest(Track(0.0, error=QueueFull("full")), 4, True), False),
        (SoakRequest(Track(0.0, error=AdapterUnavailable("late")), 4, True), True),
        (SoakRequest(Track(0.0, 3, finish_reason=FinishReason.LENGTH), 4, False), True),
        (SoakRequest(Track(0.0, 4, finish_reason=FinishReason.LENGTH), 4, False), False),
    ],
)
def test_an_end_that_nobody_asked_for_is_seen(asked, is_wrong) -> None:
    if is_wrong:
        with pytest.raises(AssertionError):
            asked.check()
    else:
        asked.check()


def _samples(change: Callable[[float], float]) -> list[int]:
    """1 GiB times 1 + `change` of how far the time after the warm-up has come, of 0 to 1."""
    warm_up = int(NUM_SAMPLES * WARM_UP_SHARE)
    rest = NUM_SAMPLES - warm_up
    flat = [int((1 + change(index / (rest - 1))) * 2**30) for index in range(rest)]
    return [1 << 29] * warm_up + flat


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda at: 0.025 * at, id="grows"),
        pytest.param(lambda at: -0.025 * at, id="shrinks"),
        pytest.param(lambda at: 0.015 * at, id="grows, each sample near the median"),
        pytest.param(lambda at: 0.02 * (0.4 < at < 0.6), id="a bump in the middle"),
    ],
)
def test_memory_that_does_not_stay_is_seen(change) -> None:
    run = Soak(None, Kinds([], [], 512), 0)
    run.samples = _samples(change)
    with pytest.raises(AssertionError, match="resident memory"):
        run.check_memory()


def test_memory_that_stays_passes() -> None:
    noise, run = random.Random(0), Soak(None, Kinds([], [], 512), 0)
    run.samples = _samples(lambda at: noise.uniform(-0.003, 0.003))
    run.samples[40] += 30 << 20  # one reading
    run.check_memory()
