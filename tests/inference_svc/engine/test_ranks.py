"""Ranks: a step's buffer, pulls of all ranks together, refusals, and equal tokens."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.images.targets import TargetKind
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.stages import joined
from inference_svc.adapters.memory.tiers import (
    DivideMagnitudes,
    MixWrite,
    TableClear,
    TableWrite,
)
from inference_svc.adapters.pulls.pull import ImageSink, PullDone, PullFailed, PullJob
from inference_svc.adapters.pulls.threads import Cancelled
from inference_svc.adapters.targets import build_layout, cut_as
from inference_svc.backends.exchange import ExchangeFailed, GlooMeeting
from inference_svc.backends.native.backend import NativeFactory
from inference_svc.backends.slot_runs import SlotRuns
from inference_svc.backends.step_data import ScoredSlice, StepData
from inference_svc.core import Request, SamplingParams
from inference_svc.engine.build import build_engine
from inference_svc.engine.ranks import group, peers
from inference_svc.engine.ranks.main import check_alike
from inference_svc.engine.ranks.messages import CancelPull, Opened, OpenPull, Pull, PullEnded
from inference_svc.engine.ranks.pulls import RankPulls
from inference_svc.engine.ranks.steps import (
    SlotDivide,
    SlotWrite,
    StepReader,
    StepWriter,
    decode_changes,
    encode_changes,
)
from inference_svc.engine.transport.messages import StepOutputs, Submit
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import AdapterUnusable, CorruptImage, EngineFailed, UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.description import Rank
from inference_svc.model.recurrent_states import Segment, StateCopy
from inference_svc.model.sharding.description import of_rank
from inference_svc.store.client import NoStore
from servicekit.errors import Unavailable
from tests.support.inference.memory_store import make_image
from tests.support.inference.ranks import config_of, generate, no_store, save_model
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("forked_ranks")

HEADER = make_image("sha256:abc", 4).header
EXTENTS = (Extent(0, 256, 1024),)
ARENA_BYTES = 1 << 20


def test_a_step_survives_its_buffer() -> None:
    data = StepData(
        [5, 6, 7, 9],
        [0, 11],
        [3, 1],
        [[4], [2, 7, 1]],
        SlotRuns([-1, 3, 0], [1, 2, 1]),
        [3, 0],
        [ScoredSlice([0, 1], SlotRuns([3], [2])), ScoredSlice([2], SlotRuns([-1], [1]))],
        [Segment(0, 4, 2), Segment(4, 1, 1), Segment(9, 2, 1)],
        [StateCopy(1, 11), StateCopy(1, 6)],
        returns_experts=True,
        plan=(1, 0, 2),
        pictures=((1, 3), (3, 4)),
    )
    axes = np.array([[0, 1, 1, 9], [0, 1, 1, 9], [0, 1, 2, 9]])
    changes = [
        TableClear(7),
        TableWrite(Resident(HEADER, 3, EXTENTS, 4)),
        MixWrite(1, ((3, 0.3), (5, -1e-9))),
        DivideMagnitudes(Resident(HEADER, 4, EXTENTS, 4)),
    ]
    writer, reader = StepWriter(), StepReader()
    found = reader.read(writer.write(changes, data._replace(axes=axes)))
    assert np.array_equal(found.data.axes, axes)
    assert found.data._replace(axes=None) == data
    named = SlotWrite(3, "sha256:abc"), SlotDivide(4, "sha256:abc")
    assert found.changes == [changes[0], named[0], changes[2], named[1]]
    assert decode_changes(encode_changes(changes)) == found.changes
    empty = StepData([1], [0], [1], [[0]], SlotRuns([-1], [1]), [-1], [], [], [])
    assert reader.read(writer.write([], empty)) == ([], empty)


@given(data=st.data())
def test_pages_of_rows(data: st.DataObject) -> None:
    """Sequences come, go, change places, and get pages; others read the same ones."""
    writer, reader = StepWriter(), StepReader()
    new_lists = st.lists(st.integers(0, 99), max_size=3)
    running: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        running += data.draw(st.lists(new_lists, max_size=3))
        running = data.draw(st.permutations(running))[:5]
        for each in running:
            each += data.draw(new_lists)
        numbers = [0] * len(running)
        step = StepData(numbers, numbers, numbers, running, SlotRuns([], []), numbers, [], [], [])
        assert reader.read(writer.write([], step)).data == step


@dataclass
class FakeRank:
    rank: Rank
    sent: list[Any] = field(default_factory=list)

    def send(self, message: object) -> None:
        self.sent.append(message)


@dataclass
class FakeGroup:
    others: list[FakeRank] = field(default_factory=lambda: [FakeRank(Rank(i, 3)) for i in (1, 2)])
    failure: Exception | None = None
    is_ended: bool = False
    on_pull_opened: Callable[[int, Opened], None] = lambda index, opened: None
    on_pull_ended: Callable[[int, PullEnded], None] = lambda index, ended: None


class Pulls:
    """A pull of three ranks that rank 0 has done, or not, and that waits for the others."""

    def __init__(self, *, is_cancelled: bool = False) -> None:
        self.group: Any = FakeGroup()
        self.landed: list[Any] = []
        self.pulls = RankPulls(self.group, self.landed.append)
        self.pulls.set_layouts(("one", "two"))
        self.job = PullJob("sha256:abc", "zero")
        self.job.progress.sink = ImageSink(memoryview(bytearray(2048)), EXTENTS)
        self.pulls.begin(self.job, HEADER, EXTENTS)
        event = PullFailed(self.job, None) if is_cancelled else PullDone(self.job)
        self.found: list[Any] = []
        self.thread = threading.Thread(
            target=lambda: self.found.append(self.pulls.finish(self.job, event))
        )
        self.thread.start()

    def end(self, index: int, error: Any = None, *, is_done: bool = True) -> None:
        self.group.on_pull_ended(index, PullEnded(1, is_done, error))

    def result(self) -> Any:
        self.thread.join(20)
        return self.found[0]

    def cancelled(self) -> bool:
        return all(each.sent[-1] == CancelPull(1) for each in self.group.others)


def test_a_pull_is_done_when_all_ranks_are() -> None:
    pulls = Pulls()
    orders = [each.sent[0] for each in pulls.group.others]
    expected = [
        Pull(1, "sha256:abc", layout_id, HEADER.segments, EXTENTS) for layout_id in ("one", "two")
    ]
    assert orders == expected
    pulls.end(2)
    assert pulls.thread.is_alive()
    pulls.end(1)
    assert pulls.result() == PullDone(pulls.job)


def test_a_pull_that_fails_on_one_rank_fails_on_all() -> None:
    """It ends when no rank writes any more."""
    pulls, error = Pulls(), CorruptImage("bytes")
    pulls.end(1, error, is_done=False)
    until(pulls.cancelled)
    assert pulls.thread.is_alive(), "rank 2 may still write"
    pulls.end(2, is_done=False)
    assert pulls.result() == PullFailed(pulls.job, error)


def test_a_pull_that_is_cancelled_ends_on_all() -> None:
    pulls = Pulls(is_cancelled=True)
    until(pulls.cancelled)
    pulls.end(1, is_done=False)
    assert pulls.thread.is_alive()
    pulls.end(2)
    assert pulls.result() == PullFailed(pulls.job, None)


def test_a_part_that_ends_before_its_end_is_not_done() -> None:
    pulls = Pulls()
    pulls.end(1, is_done=False)
    pulls.end(2)
    error = pulls.result().error
    assert isinstance(error, Unavailable)
    assert "rank 1 ended its pull of the adapter before the end" in str(error)


def test_a_job_that_goes_on_while_it_is_being_parked() -> None:
    """Its first thread may be late: the other one has begun the pulls of all ranks."""
    pulls = Pulls()
    assert pulls.pulls.finish(pulls.job, None) is None
    assert not pulls.cancelled()
    pulls.end(1)
    pulls.end(2)
    assert pulls.result() == PullDone(pulls.job)


def test_another_image_of_the_same_adapter_ends_earlier_pulls() -> None:
    pulls = Pulls()
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(pulls.pulls.open, pulls.job, HEADER)
        until(pulls.cancelled)
        pulls.end(1, is_done=False)
        assert not opening.done(), "rank 2 may still write"
        pulls.end(2, is_done=False)
        assert opening.result(20) == HEADER


@pytest.mark.parametrize("failure", [EngineFailed("rank 2 does not answer"), None])
def test_a_pull_ends_with_its_ranks(failure: EngineFailed | None) -> None:
    """They have failed, or are being closed; none says that it has ended its part."""
    pulls = Pulls()
    pulls.group.failure, pulls.group.is_ended = failure, True
    assert pulls.result() == PullFailed(pulls.job, failure)


class StagedPulls:
    """Pulls of two stages of two ranks, whose images differ."""

    def __init__(self) -> None:
        self.group: Any = FakeGroup([FakeRank(Rank(index, 4)) for index in (1, 2, 3)])
        self.landed: list[Any] = []
        self.pulls = RankPulls(self.group, self.landed.append, None, 2, ARENA_BYTES)
        self.pulls.set_layouts(("one", "two", "three"))
        self.job = PullJob("sha256:abc", "zero")
        self.second = make_image("sha256:abc", 2, (1, 2)).header

    def open(self) -> Any:
        """Has the first rank of the second stage open its pull; returns the header of all."""
        with ThreadPoolExecutor(1) as threads:
            opening = threads.submit(self.pulls.open, self.job, HEADER)
            until(lambda: self.sent(2) != [])
            number = self.sent(2)[-1].number
            self.group.on_pull_opened(2, Opened(number, self.second))
            return opening.result(20)

    def sent(self, index: int) -> list[Any]:
        return self.group.others[index - 1].sent


def test_stages_say_how_large_their_parts_are() -> None:
    """One rank of each stage, before all get extents of their own."""
    pulls = StagedPulls()
    whole = pulls.open()
    assert whole == joined((HEADER, pulls.second))
    assert pulls.sent(2) == [OpenPull(1, "sha256:abc", "two")]
    assert pulls.sent(1) == pulls.sent(3) == []
    first = Extent(0, 256, HEADER.total_bytes)
    second = Extent(0, 512, pulls.second.total_bytes)
    placed = replace(second, image_offset=first.num_bytes, start=ARENA_BYTES + 512)
    assert pulls.pulls.finish(pulls.job, None) is None, "it is parked: the pulls stay open"
    pulls.job.progress.sink = ImageSink(memoryview(b""), (first, placed))
    pulls.pulls.begin(pulls.job, HEADER, (first, placed))
    facts = pulls.second.segments, (second,)
    assert pulls.sent(1) == [Pull(1, "sha256:abc", "one", HEADER.segments, (first,))]
    assert pulls.sent(2)[1:] == [Pull(1, "sha256:abc", "two", *facts, is_open=True)]
    assert pulls.sent(3) == [Pull(1, "sha256:abc", "three", *facts)]
    for index in (1, 2, 3):
        pulls.group.on_pull_ended(index, PullEnded(1, True))
    assert pulls.pulls.finish(pulls.job, PullDone(pulls.job)) == PullDone(pulls.job)
    assert pulls.landed == [(first,)], "the first stage's"


def test_a_stage_that_cannot_open_its_pull() -> None:
    pulls, error = StagedPulls(), CorruptImage("header")
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(pulls.pulls.open, pulls.job, HEADER)
        until(lambda: pulls.sent(2) != [])
        pulls.group.on_pull_ended(2, PullEnded(1, False, error))
        with pytest.raises(CorruptImage, match="header"):
            opening.result(20)
    failed = PullFailed(pulls.job, error)
    assert pulls.pulls.finish(pulls.job, failed) == failed


def test_a_stage_that_is_closed_before_it_has_opened_its_pull() -> None:
    """Nothing has failed: the engine ends."""
    pulls = StagedPulls()
    pulls.group.is_ended = True
    with pytest.raises(Cancelled):
        pulls.pulls.open(pulls.job, HEADER)


def test_open_pulls_of_a_parked_job_that_is_abandoned() -> None:
    """Nobody waits for their end, as they write nothing."""
    pulls = StagedPulls()
    pulls.open()
    pulls.pulls.abandon(pulls.job)
    assert pulls.sent(2)[-1] == CancelPull(1)
    pulls.group.on_pull_ended(2, PullEnded(1, False))
    assert pulls.pulls.finish(pulls.job, None) is None


def test_images_of_ranks_lie_alike() -> None:
    """Else they are refused: experts may differ in size between the parts that ranks have."""
    first = HEADER.segments
    check_alike([each._replace(scale=2.0) for each in first], first, 1)
    longer = [first[0]._replace(length_bytes=9999), *first[1:]]
    with pytest.raises(CorruptImage, match="another rank has other segments"):
        check_alike(longer, first, 1)
    with pytest.raises(AdapterUnusable, match="with --expert-parallel 2 each process"):
        check_alike(longer, first, 2)
    with pytest.raises(CorruptImage, match="another rank has other segments"):
        check_alike(first[1:], first, 2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("is_fully_sharded", [False, True])
def test_layouts_of_ranks(model_dir: Path, *, is_fully_sharded: bool) -> None:
    """They have the same targets, whose slices make up the whole; if they are fully sharded, of all
    projections by inputs and by outputs."""
    whole = load_description(model_dir)
    parts_of_four = [of_rank(whole, Rank(index, 4)) for index in range(4)]
    layouts = [
        build_layout(part, "base", torch.float32, is_fully_sharded=is_fully_sharded)
        for part in parts_of_four
    ]
    expected = build_layout(whole, "base", torch.float32)
    for index, target in enumerate(expected.all_targets):
        parts = [layout.all_targets[index] for layout in layouts]
        assert all(replace(p, in_slice=None, out_slice=None) == target for p in parts)
        for slices, size in (
            ([part.inputs for part in parts], target.in_features),
            ([part.outputs for part in parts], target.out_features),
        ):
            ends = sorted(set(slices))
            assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
            assert ends[-1][1] == size
        assert len({part.num_in * part.num_out for part in parts}) == 1, "images lie alike"
        if target.layer is not None and target.kind is TargetKind.LINEAR:
            assert all((p.in_slice and p.out_slice) for p in parts) == is_fully_sharded
    assert cut_as(layouts[0], layouts[3]) == layouts[3]


def test_inputs_that_ranks_cannot_share_are_refused(model_dir: Path) -> None:
    part = replace(of_rank(load_description(model_dir), Rank(0, 2)), rank=Rank(0, 3))
    with pytest.raises(UnsupportedModel, match="q_proj's inputs, 32, do not divide by --tensor-pa"):
        build_layout(part, "base", torch.float32, is_fully_sharded=True)


def tokens(model_dir: Path, count: int, *, native: bool, sleeps: bool = False) -> list[list[int]]:
    config = config_of(model_dir, count, native_kernels=native, prefix_cache=False)
    built = build_engine(config, NoStore(), lambda event: None, no_store)
    try:
        backend = built.engine.runner.backend
        assert backend.kernels.startswith("native" if native else "torch")
        if sleeps:
            held_bytes = backend.weights_bytes
            assert backend.free_memory(weights=True) > 2 * held_bytes, "of both ranks"
            backend.restore()
        return generate(built.engine, [tuple(range(n + 1, 3 * n + 12)) for n in range(5)], 32)[0]
    finally:
        built.close()


@pytest.mark.processes
@pytest.mark.parametrize("native", [True, False])
def test_tokens_of_ranks_are_equal(model_dir: Path, *, native: bool) -> None:
    """More requests than run at once, in chunks of 7; also after ranks have slept."""
    expected = tokens(model_dir, 1, native=native)
    assert all(len(each) == 32 for each in expected)
    assert tokens(model_dir, 2, native=native, sleeps=True) == expected
    assert tokens(model_dir, 4, native=native) == expected


@pytest.mark.processes
def test_memory_that_some_ranks_cannot_restore(model_dir: Path, tmp_path: Path) -> None:
    """The error is rank 0's to raise, and the next try succeeds."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    config = config_of(folder, 2, prefix_cache=False)
    built = build_engine(config, NoStore(), lambda event: None, no_store)
    try:
        backend, file = built.engine.runner.backend, folder / "model.safetensors"
        freed_bytes = backend.free_memory(weights=True)
        file.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises((OSError, UnsupportedModel)):
                backend.restore()
        (tmp_path / "away").rename(file)
        backend.restore()
        prompts = [tuple(range(n + 1, 3 * n + 12)) for n in range(5)]
        assert generate(built.engine, prompts, 32)[0] == tokens(model_dir, 1, native=True)
        assert backend.free_memory(weights=True) == freed_bytes
    finally:
        built.close()


class Failing:
    """An engine of two ranks in a thread, and all that it says. The thread that builds it ends, as
    in the engine's process."""

    def __init__(self, model_dir: Path) -> None:
        config = config_of(model_dir, 2)
        with ThreadPoolExecutor(1) as builder:
            self.engine = builder.submit(EngineThread, config, NoStore(), no_store).result()
        self.steps: list[StepOutputs] = []
        self.engine.start(self.steps.append)
        ranks = self.engine.built.ranks
        assert ranks is not None
        [self.rank] = ranks.others

    def submit(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        self.engine.send(Submit(Request("one", (1, 2, 3), params)))
        until(lambda: any(step.outputs for step in self.steps))

    def end(self) -> str:
        """Waits for the end; returns why, as operators read it."""
        until(lambda: bool(self.steps) and self.steps[-1].failure is not None)
        failure = self.steps[-1].failure
        self.engine.stop()
        until(lambda: not self.engine.is_alive)
        return str(failure)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "PING_S", 1.0)
    monkeypatch.setattr(group, "SILENCE_S", 5.0)


@pytest.mark.processes
def test_a_rank_that_is_killed_while_nothing_runs(model_dir: Path) -> None:
    failing = Failing(model_dir)
    os.kill(failing.rank.pid, signal.SIGKILL)
    assert "rank 1 was ended by SIGKILL" in failing.end()


@pytest.mark.processes
@pytest.mark.usefixtures("short_silence")
def test_a_rank_that_hangs_while_nothing_runs(model_dir: Path) -> None:
    failing = Failing(model_dir)
    os.kill(failing.rank.pid, signal.SIGSTOP)
    assert "rank 1 does not answer" in failing.end()
    assert not Path(f"/proc/{failing.rank.pid}").exists()


@pytest.mark.processes
@pytest.mark.usefixtures("short_silence")
def test_a_rank_that_hangs_in_a_step(model_dir: Path) -> None:
    """Its request is answered."""
    failing = Failing(model_dir)
    failing.submit()
    os.kill(failing.rank.pid, signal.SIGSTOP)
    assert "rank 1 does not answer" in failing.end()
    errors = [output.error for step in failing.steps for output in step.outputs if output.error]
    assert len(errors) == 1
    assert isinstance(errors[0], EngineFailed)


@pytest.mark.processes
def test_a_rank_that_cannot_take_a_message(model_dir: Path) -> None:
    failing = Failing(model_dir)
    failing.rank.send("no message")
    assert "rank 1 failed: AttributeError" in failing.end()


@pytest.mark.processes
def test_messages_that_a_rank_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill its socket: it is killed, and later ones do not wait."""
    monkeypatch.setattr(peers, "SILENCE_S", 1.0)
    with ThreadPoolExecutor(1) as starter:
        rank = starter.submit(peers.RankProcess, Rank(1, 2)).result()
        os.kill(rank.pid, signal.SIGSTOP)
        for _ in range(100):
            rank.send(bytes(1 << 16))
        assert rank.end(20) == "does not answer"
        rank.close()


@pytest.mark.processes
def test_a_rank_that_ends_while_another_hangs(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start ends, and no process is left."""
    monkeypatch.setattr(group, "END_S", 1.0)
    failures: list[EngineFailed] = []
    config = config_of(model_dir, 3)
    ranks = group.RankGroup(config, NativeFactory(), no_store, failures.append)
    first, second = (each.pid for each in ranks.others)
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="rank 2 was ended by SIGKILL while it started"):
        ranks.meet()
    ranks.close()
    assert not failures, "nobody serves yet"
    assert not Path(f"/proc/{first}").exists()


def test_ranks_that_do_not_meet() -> None:
    meeting = GlooMeeting(2, 1.0)
    with pytest.raises(ExchangeFailed, match="ranks did not meet"):
        meeting.join(Rank(0, 2))
    copy = pickle.loads(pickle.dumps(meeting))
    meeting.close()
    with pytest.raises(ExchangeFailed, match="ranks did not meet"):
        copy.join(Rank(1, 2))


ENGINE_PROGRAM = """
import sys, time
from inference_svc.engine.ranks.peers import RankProcess
from inference_svc.model.description import Rank
rank = RankProcess(Rank(1, 2))
print(rank.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.processes
def test_a_stopped_rank_ends_with_its_engine() -> None:
    with subprocess.Popen([sys.executable, "-c", ENGINE_PROGRAM], stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        process = Path("/proc", engine.stdout.readline().decode().strip())
        until(lambda: "libtorch" in (process / "maps").read_text())
        os.kill(int(process.name), signal.SIGSTOP)
        engine.kill()
    until(lambda: has_ended(process))


def has_ended(process: Path) -> bool:
    """Returns whether a process is gone, or only its parent has not noticed."""
    try:
        return "State:\tZ" in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.processes
def test_a_rank_that_cannot_be_built(model_dir: Path) -> None:
    """The same error as rank 0's, and no process is left."""
    config = replace(config_of(model_dir, 3), num_threads=1)
    with pytest.raises(UnsupportedModel, match="--tensor-parallel 3: layers"):
        build_engine(config, NoStore(), lambda event: None, no_store)
