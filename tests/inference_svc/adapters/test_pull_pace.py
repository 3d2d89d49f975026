"""The pace of large images: only beside steps on the same processors, and of all pulls together."""

from __future__ import annotations

import itertools
import threading

import pytest

from contract.images.header import ImageChunk
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.pulls import pace as pull_pace
from inference_svc.adapters.pulls import part_checks
from inference_svc.adapters.pulls.pace import PROCESSOR_BYTES_PER_S, UNPACED_BYTES, PullPace
from inference_svc.adapters.pulls.pull import PullDone, PullJob
from tests.support.inference.memory_store import LAYOUT_ID
from tests.support.inference.scripted_pulls import Scripted, outcome_of

LARGE = UNPACED_BYTES + 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests advance."""
    found = [100.0]
    monkeypatch.setattr(pull_pace.time, "monotonic", lambda: found[0])
    return found


def busy(num_processors: int = 2) -> PullPace:
    pace = PullPace(num_processors)
    pace.is_needed = lambda: True
    return pace


def test_large_images_come_at_the_pace(now: list[float]) -> None:
    """However long the bytes themselves take, up to what is due."""
    pace, begin_s, num_bytes = busy(), now[0], 1 << 20
    for took_s in (0.0, 0.002, 0.005, 0.001) * 20:
        now[0] += took_s
        now[0] += pace.delay_s(LARGE, num_bytes)
    due_s = 80 * num_bytes / (2 * PROCESSOR_BYTES_PER_S)
    assert now[0] - begin_s == pytest.approx(due_s, rel=0.02)


def test_pulls_share_the_pace(now: list[float]) -> None:
    pace = busy()
    delays = [pace.delay_s(LARGE, 1 << 20) for _ in range(8)]
    each_s = (1 << 20) / (2 * PROCESSOR_BYTES_PER_S)
    steps = [after - before for before, after in itertools.pairwise(delays)]
    assert steps == pytest.approx([each_s] * 7)


def test_late_bytes_are_not_made_up_for(now: list[float]) -> None:
    pace = busy()
    pace.delay_s(LARGE, 1 << 20)
    now[0] += 60
    assert pace.delay_s(LARGE, 1 << 20) == 0
    assert pace.delay_s(LARGE, 1 << 20) > 0


def test_nothing_waits_for_nobody(now: list[float]) -> None:
    pace = busy()
    assert pace.delay_s(UNPACED_BYTES, 1 << 20) == 0, "small images, and the beginning of others"
    pace.is_needed = lambda: False
    assert pace.delay_s(LARGE, 1 << 30) == 0
    assert PullPace.where_shared(num_processors=64, num_threads=32) is None
    assert PullPace.where_shared(num_processors=2, num_threads=2) is not None


def test_a_pull_pauses_and_cancelling_ends_its_pause(
    monkeypatch: pytest.MonkeyPatch, store, layout: ModelLayout
) -> None:
    store.add("aaaa")
    messages = list(store.pull("aaaa", LAYOUT_ID))
    num_chunks = sum(isinstance(each, ImageChunk) for each in messages)
    monkeypatch.setattr(pull_pace, "UNPACED_BYTES", 0)
    monkeypatch.setattr(pull_pace, "PROCESSOR_BYTES_PER_S", 1 << 40)
    paused: list[float] = []
    monkeypatch.setattr(PullJob, "pause", lambda job, seconds: paused.append(seconds))
    assert isinstance(outcome_of(Scripted(messages), layout, busy()), PullDone)
    assert len(paused) == num_chunks > 0
    monkeypatch.undo()
    job = PullJob("aaaa", LAYOUT_ID)
    pausing = threading.Thread(target=job.pause, args=(600.0,), daemon=True)
    pausing.start()
    job.cancel()
    pausing.join(timeout=60)
    assert not pausing.is_alive()


def test_a_mapped_image_pauses_in_the_thread_of_its_pull(
    monkeypatch: pytest.MonkeyPatch, store, layout: ModelLayout
) -> None:
    """Others wait for the threads that hash."""
    store.maps = True
    num_parts = len(store.add("aaaa").ends)
    monkeypatch.setattr(pull_pace, "UNPACED_BYTES", 0)
    monkeypatch.setattr(part_checks, "INLINE_BYTES", 0)
    paused: list[str] = []

    def pause(job: PullJob, seconds: float) -> None:
        paused.append(threading.current_thread().name)

    monkeypatch.setattr(PullJob, "pause", pause)
    assert isinstance(outcome_of(store, layout, busy()), PullDone)
    assert paused == ["loadout-pull-0"] * num_parts
