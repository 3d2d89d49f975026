"""Ranks of the CUDA backend replay the same recorded steps, and give what one gives. Here torch
computes, a recording computes anew, and gloo exchanges between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from inference_svc.adapters.targets import applied_targets, build_layout
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import Reload
from inference_svc.backends.cuda import padded_sizes
from inference_svc.backends.cuda.exchange import (
    BlockingExchange,
    DeviceExchange,
    DeviceMeeting,
    Groups,
)
from inference_svc.backends.cuda.factory import check_devices
from inference_svc.backends.cuda.graphs import LATEST_USE, Compute, RecordingFailed
from inference_svc.backends.cuda.padded_sizes import StepKind
from inference_svc.backends.cuda.rank import CudaRank
from inference_svc.backends.cuda.steps import StepLimits
from inference_svc.backends.exchange import (
    LOCAL,
    ExchangeFailed,
    Place,
    StepAbandoned,
    gloo_group,
)
from inference_svc.backends.step_data import StepData
from inference_svc.core import Batch
from inference_svc.engine.ranks.steps import StepReader, StepWriter
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.weights import load_weights
from inference_svc.model.description import Rank
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchProjections
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.transformer import Transformer
from kernels.streams import HostStream
from tests.support.gpu.models import (
    MAX_PAGES,
    MAX_ROWS,
    MAX_TOKENS,
    NUM_PAGES,
    NUM_STATES,
    PAGE_SIZE,
    Eager,
    settle,
    steps,
)
from tests.support.models.zoo import make_model

COUNT = 2
CPU = torch.device("cpu")
BASE = [-1] * 5


def exchanges(limit_s: float = 60.0) -> list[DeviceExchange]:
    """Returns the exchanges of ranks that are threads."""
    store = dist.HashStore()

    def make(index: int) -> DeviceExchange:
        place = Place(index, 0, COUNT, 1)
        groups = Groups.of(place, lambda name, rank: gloo_group(rank, store, limit_s, LOCAL))
        return DeviceExchange(place, groups, CPU, HostStream("compute"), limit_s, "gloo")

    return on_threads(make)


def on_threads(run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(COUNT) as threads:
        return list(threads.map(run, range(COUNT)))


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def folder(request: Any, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    make_model(request.param, path)
    return path


by_hybrid = pytest.mark.parametrize(
    "folder", [pytest.param("llama", marks=pytest.mark.long), "qwen3_5"], indirect=True
)
"""The hybrid has pages and states, so `make test` has these tests of it alone."""


@dataclass
class Recorder:
    """Records as `Eager` does; fails where it is told to, before the step if memory `is_full`."""

    num_recorded: int = 0
    fails: bool = False
    is_full: bool = False

    def __call__(self, compute: Compute) -> Eager:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made = Eager(compute)
        if self.fails:
            raise RecordingFailed("no memory")
        self.num_recorded += 1
        return made


def backend_of(
    folder: Path, index: int, exchange: DeviceExchange, record: Any, lacking: Sequence[int] = ()
) -> CudaRank:
    """`lacking`: the ranks that have no memory for their weights, once others have taken it."""
    whole = load_description(folder).for_length(MAX_PAGES * PAGE_SIZE)
    decoder = of_rank(whole, Rank(index, COUNT))
    layout = build_layout(decoder, "model", torch.float32)

    def caches() -> KVCaches:
        sizes = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE}
        return KVCaches.allocate(decoder, **sizes, dtype=torch.float32)

    def states() -> RecurrentStates | None:
        return RecurrentStates.allocate(decoder, NUM_STATES) if decoder.recurrences else None

    def weights() -> Any:
        if index in lacking:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load_weights(folder, decoder, torch.float32, "cpu", TorchProjections())

    backend = CudaRank(
        Transformer(decoder, weights(), exchange),
        caches(),
        Arena(layout, 1 << 16, 3, 4, CPU, num_mixes=MAX_ROWS),
        applied_targets(layout),
        StepLimits(MAX_TOKENS, MAX_ROWS, MAX_PAGES),
        record,
        Reload(caches, weights, states, lambda _: None),
        states(),
        exchange,
    )
    backend.warm_up()
    return backend


@dataclass
class Ranks:
    """Both ranks, of which the first is given batches, as `RankedBackend` does."""

    backends: list[CudaRank]
    writer: StepWriter = field(default_factory=StepWriter)
    reader: StepReader = field(default_factory=StepReader)

    def run(self, batch: Batch) -> Any:
        first, second = self.backends
        states = first.num_states
        data = StepData.of(batch.rows, MAX_ROWS, states)
        inputs = first.prepare(batch)
        data = data._replace(plan=first.plan(inputs))
        sent = self.reader.read(self.writer.write([], data)).data

        def compute(index: int) -> Any:
            if index:
                return second.follow(sent)
            logits = first.forward(inputs).values.clone()
            list(first.score(inputs))
            return logits

        found = on_threads(compute)[0]
        settle(batch)
        return found

    def use_idle_time(self) -> list[bool]:
        wants = [each.wants_idle_time for each in self.backends]
        assert wants[0] == wants[1]
        return on_threads(lambda index: self.backends[index].use_idle_time()) if wants[0] else []


def start(
    folder: Path, records: Sequence[Any], lacking: Sequence[int] = (), limit_s: float = 60.0
) -> Ranks:
    made = exchanges(limit_s)
    return Ranks(
        on_threads(lambda index: backend_of(folder, index, made[index], records[index], lacking))
    )


def whole_logits(folder: Path, batches: list[Batch]) -> list[torch.Tensor]:
    """Returns what one process computes."""
    from inference_svc.backends.torch import TorchBackend

    decoder = load_description(folder).for_length(MAX_PAGES * PAGE_SIZE)
    layout = build_layout(decoder, "model", torch.float32)
    weights = load_weights(folder, decoder, torch.float32, "cpu", TorchProjections())
    caches = KVCaches.allocate(
        decoder, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=torch.float32
    )
    states = RecurrentStates.allocate(decoder, NUM_STATES) if decoder.recurrences else None
    arena = Arena(layout, 1 << 16, 3, 4, CPU, num_mixes=MAX_ROWS)
    backend = TorchBackend(
        Transformer(decoder, weights),
        caches,
        arena,
        applied_targets(layout),
        MAX_ROWS,
        states=states,
    )
    found = []
    for batch in batches:
        found.append(backend.forward(backend.prepare(batch)).values.clone())
        settle(batch)
    return found


@pytest.mark.parametrize("is_recorded", [True, False])
def test_steps(folder: Path, is_recorded: bool) -> None:
    """Prompts in chunks, decodes of all rows and of some, scored or not, padded or not."""
    ranks = start(folder, [Recorder() if is_recorded else None for _ in range(COUNT)])
    for logprobs in (None, 1):
        wanted = whole_logits(folder, steps(BASE, prompt_logprobs=logprobs))
        for batch, expected in zip(steps(BASE, prompt_logprobs=logprobs), wanted, strict=True):
            torch.testing.assert_close(ranks.run(batch), expected, rtol=1e-4, atol=1e-4)
    first, second = ranks.backends
    assert (first.num_replays, first.num_eager_steps) == (
        second.num_replays,
        second.num_eager_steps,
    )
    assert (first.num_replays > 0) == is_recorded


@by_hybrid
def test_steps_that_occur_are_recorded_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In idle time, or at their latest use; if one rank cannot, none has it."""
    monkeypatch.setattr(padded_sizes, "USUAL_TOKENS", 0)
    recorders = [Recorder(), Recorder()]
    ranks = start(folder, recorders)
    num_recorded = recorders[0].num_recorded
    expected = [ranks.run(batch) for batch in steps(BASE)[:2]]
    assert ranks.use_idle_time() == [True, True]
    assert [each.num_recorded for each in recorders] == [num_recorded + 1] * COUNT
    recorders[1].fails = True
    assert ranks.use_idle_time() == [False, False]
    for _ in range(LATEST_USE + 1):
        found = [ranks.run(batch) for batch in steps(BASE)[:2]]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    shapes = [each.recorded.shapes for each in ranks.backends if each.recorded is not None]
    assert shapes[0] == shapes[1]
    kinds = [shape.kind for shape in shapes[0] if shape.has_prompts]
    assert sorted(kinds, key=lambda kind: kind.value) == [StepKind.BASE, StepKind.ANY]


def test_a_rank_that_cannot_record_ends_the_start(folder: Path) -> None:
    made, recorders = exchanges(), [Recorder(), Recorder(fails=True)]

    def begin(index: int) -> BaseException | None:
        try:
            backend_of(folder, index, made[index], recorders[index])
        except (RecordingFailed, ExchangeFailed) as error:
            return error
        return None

    found = on_threads(begin)
    assert list(map(str, found)) == ["another rank could not record the step", "no memory"]
    assert list(map(type, found)) == [ExchangeFailed, RecordingFailed], "whose fault it is"


@by_hybrid
def test_another_plan_is_refused(folder: Path) -> None:
    """Ranks that have recorded other steps would wait for each other for ever."""
    ranks = start(folder, [Recorder(), Recorder()])
    [batch, *_] = steps(BASE)
    data = StepData.of(batch.rows, MAX_ROWS, ranks.backends[0].num_states)
    is_decode, is_taken, *shape = ranks.backends[0].plan(ranks.backends[0].prepare(batch))
    with pytest.raises(ExchangeFailed, match="recorded other steps"):
        ranks.backends[1].follow(data._replace(plan=(is_decode, not is_taken, *shape)))


@by_hybrid
@pytest.mark.slow
def test_memory_is_made_again_on_all_ranks_or_none(folder: Path) -> None:
    lacking: list[int] = []
    ranks = start(folder, [Recorder(), Recorder()], lacking)
    expected = ranks.run(steps(BASE)[0])
    for each in ranks.backends:
        each.free_memory(weights=True)
    lacking.append(1)

    def restore(index: int) -> str:
        try:
            ranks.backends[index].restore()
        except (MemoryError, torch.OutOfMemoryError) as error:
            return str(error)
        return ""

    found = on_threads(restore)
    assert found == ["another rank has not got its memory back", "CUDA out of memory"]
    lacking.clear()
    assert on_threads(restore) == ["", ""]
    torch.testing.assert_close(ranks.run(steps(BASE)[0]), expected)


@by_hybrid
def test_a_rank_that_cannot_record_again_ends_all(folder: Path) -> None:
    """Others wait for it within a step, so that it cannot just be tried again."""
    recorders = [Recorder(), Recorder()]
    ranks = start(folder, recorders, limit_s=1.0)
    for each in ranks.backends:
        each.free_memory(weights=False)
    recorders[1].is_full = True

    def restore(index: int) -> type[Exception]:
        with pytest.raises((ExchangeFailed, StepAbandoned)) as caught:
            ranks.backends[index].restore()
        return caught.type

    assert on_threads(restore) == [ExchangeFailed, StepAbandoned]


class FullDevice(TorchDispatchMode):
    """A device without memory: operations that need some fail."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not name.endswith("_") and name != "_local_scalar_dense":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def test_ranks_without_memory_agree() -> None:
    made = exchanges()

    def agree(index: int) -> list[bool]:
        with FullDevice():
            return [made[index].agree(index == 0), made[index].agree(True)]

    assert on_threads(agree) == [[False, True]] * COUNT


class Noted:
    """A group that notes its exchanges."""

    def __init__(self, place: Rank, of: str) -> None:
        self.of = of
        self.calls: list[str] = []

    def allreduce(self, tensors: Any, options: Any) -> None:
        self.calls.append("sum")

    def broadcast(self, tensors: Any, options: Any) -> None:
        self.calls.append("broadcast")


def test_each_group_is_connected_in_each_way_of_steps() -> None:
    """Embeddings of pictures are broadcast to the ranks of a stage, and of all."""
    place = Place(0, 1, 2, 2)
    groups = Groups.of(place, lambda name, rank: Noted(rank, name))
    DeviceExchange(place, groups, CPU, HostStream("compute"), 1.0, "noted").connect()
    ways = {each.of: set(each.calls) for each in groups.every}
    both = {"sum", "broadcast"}
    pairs = {name: {"broadcast"} for name in ("0 to 1, 0", "1 to 0, 0")}
    assert ways == {"stage 1": both, "all": both} | pairs


class Stuck(HostStream):
    """The stream and the group of a rank whose other ranks have ended: what it queues never
    ends."""

    def __init__(self) -> None:
        super().__init__("compute")
        self.is_aborted = threading.Event()

    def query(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted.set()


@pytest.fixture
def stuck() -> Stuck:
    return Stuck()


@pytest.fixture
def exchange(stuck: Stuck) -> DeviceExchange:
    groups = Groups(stuck, stuck, {}, {}, [stuck])
    return DeviceExchange(Place(0, 0, 2, 1), groups, CPU, stuck, 0.05, "stuck")


def test_a_wait_ends(exchange: DeviceExchange) -> None:
    with pytest.raises(ExchangeFailed, match=r"a step has not ended for 0\.05 s"):
        exchange.wait()


def test_a_wait_ends_with_another_rank(exchange: DeviceExchange, stuck: Stuck) -> None:
    """And its group is aborted, so that the device's kernels end."""
    threading.Timer(0.01, exchange.fail).start()
    with pytest.raises(ExchangeFailed, match="another rank has failed"):
        exchange.wait(60.0)
    assert stuck.is_aborted.wait(20)
    with pytest.raises(ExchangeFailed, match="another rank has failed"):
        BlockingExchange(exchange).sum(torch.zeros(1))


def test_a_meeting_that_fails_before_ranks_have_met() -> None:
    """Then whoever comes does not wait."""

    class Meeting(DeviceMeeting):
        device = CPU  # type: ignore[assignment]

        def make_group(self, rank: Rank, store: Any) -> Any:
            return gloo_group(rank, store, 1.0, LOCAL)

    meeting = Meeting(1, 1.0)
    meeting.fail()
    with pytest.raises(ExchangeFailed, match="another rank has failed"):
        meeting.join(Rank(0, 1))
    meeting.close()


def test_a_rank_that_fails_while_others_connect() -> None:
    """NCCL goes on waiting for it."""
    is_over = threading.Event()

    class Connecting:
        def allreduce(self, tensors: Any, options: Any) -> None:
            assert is_over.wait(20)

        def abort(self) -> None:
            """Ends what runs, which this does not yet."""

    class Meeting(DeviceMeeting):
        device = CPU  # type: ignore[assignment]

        def make_group(self, rank: Rank, store: Any) -> Any:
            return Connecting()

    meeting = Meeting(2, 60.0)
    threading.Timer(0.1, meeting.fail).start()
    with pytest.raises(ExchangeFailed, match="another rank has failed"):
        meeting.join(Rank(0, 2))
    assert not is_over.is_set()
    is_over.set()
    meeting.close()


def test_devices_of_several_kinds_are_refused() -> None:
    check_devices(["NVIDIA H200"] * 2)
    with pytest.raises(
        ValueError, match="the devices of 2 processes differ: NVIDIA H200, NVIDIA L4"
    ):
        check_devices(["NVIDIA H200", "NVIDIA L4"])
