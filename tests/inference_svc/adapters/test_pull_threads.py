"""The puller against stores that break the protocol: no bytes are used, and nothing hangs."""

from __future__ import annotations

import hashlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from contract.images.dtypes import DataType
from contract.images.header import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    Segment,
    align,
)
from contract.images.segment_kinds import KIND_WORDS, SegmentKind
from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import FLOAT8, IMAGE_FORMATS, ModelLayout
from inference_svc.adapters.memory.resident import target_cuts
from inference_svc.adapters.pulls import pull as pull_job_module
from inference_svc.adapters.pulls import threads as puller_module
from inference_svc.adapters.pulls.headers import HeaderReader
from inference_svc.adapters.pulls.pull import (
    PullDone,
    PullEvent,
    PullFailed,
    PullJob,
    SilentSources,
)
from inference_svc.adapters.pulls.threads import PULL_NICENESS, Puller
from inference_svc.errors import AdapterUnusable, CorruptImage, StoreUnavailable
from tests.support.clock import Clock
from tests.support.inference.loop import Loop, assert_computes
from tests.support.inference.memory_store import LAYOUT_ID, MemoryStore, MemoryStream
from tests.support.inference.scripted_pulls import Scripted, outcome_of
from tests.support.wait import TIMEOUT_S


def outcome(messages: list[PullMessage], layout: ModelLayout) -> PullEvent:
    """Returns the last event of a pull of these messages; memory is granted at once."""
    return outcome_of(Scripted(messages), layout)


@pytest.fixture
def good(store) -> list[PullMessage]:
    store.add("aaaa")
    return list(store.pull("aaaa", LAYOUT_ID))


def test_good_stream_is_done(good: list[PullMessage], layout: ModelLayout) -> None:
    assert isinstance(outcome(good, layout), PullDone)


def format_2(header: ImageHeader, **changes: object) -> ImageHeader:
    """What a store sends of the same image to a server that reads format 2."""
    segments = tuple(
        segment._replace(dtype=DataType.FLOAT32, shape=shape_of(segment))
        for segment in header.segments
    )
    return replace(header, image_format=2, **{"segments": segments, **changes})


def shape_of(segment: Segment) -> tuple[int, ...]:
    return segment.rank, segment.length_bytes // 4 // segment.rank


def test_an_empty_image_is_done_at_once(good: list[PullMessage], layout: ModelLayout) -> None:
    """All that the adapter changes is computed elsewhere."""
    header = format_2(good[0], segments=(), total_bytes=0)
    assert isinstance(outcome(only_a_trailer([header]), layout), PullDone)


def test_targets_may_share_an_a(good: list[PullMessage], layout: ModelLayout) -> None:
    first, *others = format_2(good[0]).segments
    layout.read_header(format_2(good[0]))
    index = next(
        index
        for index, segment in enumerate(others, 1)
        if segment.kind is SegmentKind.A and segment.shape == first.shape
    )
    segments, end = [], 0
    for position, segment in enumerate((first, *others)):
        moved_to = 0 if position == index else end
        segments.append(segment._replace(offset=moved_to))
        end = max(end, -(-(moved_to + segment.length_bytes) // 256) * 256)
    shared = format_2(good[0], segments=tuple(segments), total_bytes=end)
    layout.read_header(shared)
    assert target_cuts(shared) == sorted(set(target_cuts(shared)))
    longer = segments[index]._replace(rank=segments[index].rank + 1)
    for wrong in (longer._replace(shape=shape_of(longer)), segments[index]._replace(offset=256)):
        broken = [*segments[:index], wrong, *segments[index + 1 :]]
        with pytest.raises(CorruptImage):
            layout.read_header(replace(shared, segments=tuple(broken)))


def test_a_part_of_the_rank_is_corrupt(good: list[PullMessage], layout: ModelLayout) -> None:
    """No target of the layout announces one."""
    header = format_2(good[0])
    index = max(
        i for i, each in enumerate(header.segments) if each.kind is SegmentKind.A and each.rank > 1
    )
    a = header.segments[index]
    part = a._replace(rank=a.rank - 1, length_bytes=a.length_bytes // a.rank * (a.rank - 1))
    segments = list(header.segments)
    segments[index] = part._replace(shape=shape_of(part))
    with pytest.raises(CorruptImage, match="is not an A followed by its B"):
        layout.read_header(replace(header, segments=tuple(segments)))


def with_more(header: ImageHeader, kind: SegmentKind, **changes: Any) -> ImageHeader:
    """Adds a segment of the last target to an image."""
    last, size = header.segments[-1], changes.get("shape", (1,))
    more = last._replace(kind=kind, rank=0, offset=header.total_bytes, **changes)
    more = more._replace(length_bytes=4 * math.prod(size))
    total_bytes = header.total_bytes + align(more.length_bytes)
    return replace(header, segments=(*header.segments, more), total_bytes=total_bytes)


@pytest.mark.parametrize("kind", [SegmentKind.BIAS, SegmentKind.MAGNITUDE])
def test_vectors_over_outputs_are_read(
    kind: SegmentKind, good: list[PullMessage], layout: ModelLayout
) -> None:
    header = format_2(good[0])
    width = layout.all_targets[layout.order_of_use[header.segments[-1].target]].out_features
    read = layout.read_header(with_more(header, kind, shape=(width,), dtype=DataType.FLOAT32))
    assert read.segments[-1].kind is kind
    for changes in ({"shape": (width + 1,)}, {"shape": (width,), "dtype": DataType.INT32}):
        with pytest.raises(CorruptImage, match="is misplaced"):
            layout.read_header(with_more(header, kind, **({"dtype": DataType.FLOAT32} | changes)))


def test_a_whole_linear_layer_is_refused_by_name(
    good: list[PullMessage], layout: ModelLayout
) -> None:
    header = format_2(good[0])
    target = layout.all_targets[layout.order_of_use[header.segments[-1].target]]
    shape = (target.out_features, target.in_features)
    whole = with_more(header, SegmentKind.FULL, shape=shape, dtype=DataType.FLOAT32)
    words = f"{KIND_WORDS[SegmentKind.FULL]}, which this server does not apply: {target.short_name}"
    with pytest.raises(AdapterUnusable, match=words):
        layout.read_header(whole)


def check_ids(layout: ModelLayout, ids: list[int], max_added_tokens: int = 2) -> None:
    """Checks rows of the first target."""
    segment = Segment(0, SegmentKind.ROW_IDS, 0, 0, 4 * len(ids), DataType.INT32, (len(ids),))
    header = ImageHeader("image", "aaaa", LAYOUT_ID, 2, 256, (segment,))
    data = np.array(ids, np.int32).tobytes()
    layout.check_rows(header, lambda start, size: data[start : start + size], max_added_tokens)


def test_rows_are_of_tokens_that_there_are(layout: ModelLayout) -> None:
    target = layout.targets[0]
    num_tokens = target.in_features if target.kind is TargetKind.EMBEDDING else target.out_features
    check_ids(layout, [0, 3, num_tokens - 1, num_tokens + 1])
    for ids in ([], [3, 3], [4, 2], [-1, 4]):
        with pytest.raises(CorruptImage, match="do not ascend"):
            check_ids(layout, ids)
    with pytest.raises(AdapterUnusable, match=f"a row for token {num_tokens + 2}, and this server"):
        check_ids(layout, [1, num_tokens + 2])


@pytest.mark.parametrize("target", [0, 1], ids=["embedding", "head"])
def test_added_tokens_are_refused_where_an_a_has_no_rows_for_them(target: int) -> None:
    """A token that is looked up there would be read beyond its end."""
    sizes = {TargetKind.EMBEDDING: (8, 4), TargetKind.LINEAR: (4, 8)}
    targets = [Target(kind.value, None, kind.value, kind, *size) for kind, size in sizes.items()]
    layout = ModelLayout("m", "", torch.float32, IMAGE_FORMATS, tuple(targets))
    segments = [Segment(0, SegmentKind.A, 1, 256, 32), Segment(0, SegmentKind.B, 1, 512, 16)]
    segments.append(Segment(target, SegmentKind.ROW_IDS, 0, 0, 8, DataType.INT32, (2,)))
    header = ImageHeader("image", "aaaa", LAYOUT_ID, 2, 768, tuple(segments))
    layout.check_rows(header, lambda start, size: np.array([3, 7], np.int32).tobytes(), 2)
    with pytest.raises(AdapterUnusable, match="a row for token 8, after the 8 rows of the model"):
        layout.check_rows(header, lambda start, size: np.array([3, 8], np.int32).tobytes(), 2)


@pytest.mark.parametrize("kinds", ["rows", "row_ids", "bias a", "magnitude bias"])
def test_what_is_incomplete_or_out_of_order_is_corrupt(
    kinds: str, good: list[PullMessage], layout: ModelLayout
) -> None:
    header = format_2(good[0])
    for kind in map(SegmentKind, kinds.split()):
        header = with_more(header, kind, shape=(1,), dtype=DataType.FLOAT32)
    with pytest.raises(CorruptImage, match="nor another content that a target may have"):
        layout.read_header(header)


def test_float8_is_refused_by_name(good: list[PullMessage], layout: ModelLayout) -> None:
    """The contract has it, with a scale for each segment."""
    header = format_2(good[0])
    first = header.segments[0]._replace(dtype=FLOAT8, scale=0.5)
    with pytest.raises(AdapterUnusable, match=f"{FLOAT8.torch_name}, which this server"):
        layout.read_header(replace(header, segments=(first, *header.segments[1:])))


FORMS: dict[str, dict[str, object]] = {
    "another-dtype": {"dtype": DataType.BFLOAT16},
    "an-unknown-dtype": {"dtype": None},
    "a-scale": {"scale": 2.0},
    "another-shape": {"shape": (1, 1)},
    "no-shape": {"shape": ()},
}


@pytest.mark.parametrize("case", FORMS)
def test_misfit_forms_are_corrupt(case: str, good: list[PullMessage], layout: ModelLayout) -> None:
    header = format_2(good[0])
    segments = (header.segments[0]._replace(**FORMS[case]), *header.segments[1:])
    with pytest.raises(CorruptImage):
        layout.read_header(replace(header, segments=segments))


def without(kind: type, count: int | None = None) -> Callable[[list], list]:
    def change(messages: list) -> list:
        found = [m for m in messages if isinstance(m, kind)][:count]
        return [m for m in messages if m not in found]

    return change


def second_half(messages: list) -> list:
    """Leaves out the last part, with a trailer that agrees."""
    ends = [i for i, m in enumerate(messages) if isinstance(m, LayerEnd)]
    kept = messages[: ends[-2] + 1]
    hashes = b"".join(m.sha256 for m in kept if isinstance(m, LayerEnd))
    return [*kept, ImageTrailer(hashlib.sha256(hashes).digest())]


def only_a_trailer(messages: list) -> list:
    return [messages[0], ImageTrailer(hashlib.sha256(b"").digest())]


def beyond_the_end(messages: list) -> list:
    total = messages[0].total_bytes
    return [*messages[:-1], ImageChunk(total, b"x" * 256), messages[-1]]


def moved(messages: list) -> list:
    return [replace(m, offset=m.offset + 256) if isinstance(m, ImageChunk) else m for m in messages]


def with_empty_parts(messages: list) -> list:
    """A part of no bytes after the first, with a trailer that agrees: without end, they would take
    memory without end."""
    index = next(i for i, m in enumerate(messages) if isinstance(m, LayerEnd))
    first, sha256 = messages[index], hashlib.sha256(b"").digest()
    more = LayerEnd(first.part + 1, first.end_offset, sha256)
    return _with_trailer([*messages[: index + 1], more, *messages[index + 1 : -1]])


def with_more_parts_than_segments(messages: list) -> list:
    """Parts of a byte each."""
    header = messages[0]
    data = b"".join(bytes(m.data) for m in messages if isinstance(m, ImageChunk))
    parts: list[PullMessage] = [header]
    for index in range(len(data)):
        byte = data[index : index + 1]
        parts.append(ImageChunk(index, byte))
        parts.append(LayerEnd(index, index + 1, hashlib.sha256(byte).digest()))
    return _with_trailer(parts)


def _with_trailer(messages: list) -> list:
    hashes = b"".join(m.sha256 for m in messages if isinstance(m, LayerEnd))
    return [*messages, ImageTrailer(hashlib.sha256(hashes).digest())]


BROKEN: dict[str, Callable[[list], list]] = {
    "only-a-trailer": only_a_trailer,
    "half-the-bytes": second_half,
    "no-hashes": without(LayerEnd),
    "a-chunk-missing": without(ImageChunk, 1),
    "bytes-beyond-the-end": beyond_the_end,
    "bytes-elsewhere": moved,
    "empty-parts": with_empty_parts,
    "more-parts-than-segments": with_more_parts_than_segments,
    "wrong-trailer": lambda messages: [*messages[:-1], ImageTrailer(b"0" * 32)],
    "another-digest": lambda messages: [replace(messages[0], digest="bbbb"), *messages[1:]],
    "another-layout": lambda messages: [replace(messages[0], layout_id="?"), *messages[1:]],
    "starts-in-the-middle": lambda messages: [replace(messages[0], offset=256), *messages[1:]],
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_streams_are_corrupt(
    case: str, good: list[PullMessage], layout: ModelLayout
) -> None:
    event = outcome(BROKEN[case](good), layout)
    assert isinstance(event, PullFailed)
    assert isinstance(event.error, CorruptImage)


def change_segment(index: int, **fields: object) -> Callable[[ImageHeader], ImageHeader]:
    def change(header: ImageHeader) -> ImageHeader:
        segments = list(header.segments)
        segments[index] = segments[index]._replace(**fields)
        return replace(header, segments=tuple(segments))

    return change


HEADERS: dict[str, Callable[[ImageHeader], ImageHeader]] = {
    "rank-0": change_segment(0, rank=0, length_bytes=0),
    "ranks-differ": change_segment(1, rank=64),
    "short-segment": change_segment(0, length_bytes=4),
    "unknown-kind": change_segment(0, kind=SegmentKind.BIAS),
    "target-beyond-the-layout": change_segment(0, target=99),
    "overlap": change_segment(1, offset=0),
    "unaligned": change_segment(1, offset=1025),
    "no-segments": lambda header: replace(header, segments=()),
    "an-a-alone": lambda header: replace(header, segments=header.segments[:1]),
    "targets-in-disorder": lambda header: replace(
        header, segments=(*header.segments[2:4], *header.segments[:2])
    ),
    "nothing-in-it": lambda header: replace(header, total_bytes=0),
    "more-than-its-segments": lambda header: replace(header, total_bytes=1 << 40),
    "unknown-format": lambda header: replace(header, image_format=9),
}


@pytest.mark.parametrize("case", HEADERS)
def test_misfit_headers_are_corrupt(
    case: str, good: list[PullMessage], layout: ModelLayout
) -> None:
    header = good[0]
    assert isinstance(header, ImageHeader)
    reader, bad = HeaderReader(layout), HEADERS[case](header)
    for _ in range(2):  # the second time the right one is known
        assert reader.read(header) == layout.read_header(header)
        with pytest.raises(CorruptImage):
            reader.read(bad)


class Silent:
    """An open stream that sends these messages and then nothing."""

    source, mapped = "silent", None

    def __init__(self, messages: list[PullMessage]) -> None:
        self.messages = messages
        self.fell_silent = threading.Event()
        self.cancelled = threading.Event()

    def __iter__(self) -> Generator[PullMessage]:
        yield from self.messages
        self.fell_silent.set()
        assert self.cancelled.wait(TIMEOUT_S)
        raise StoreUnavailable("cancelled")

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.mark.parametrize("num_messages", [0, 1, 3])
def test_silent_source_is_left(
    num_messages: int, good: list[PullMessage], layout: ModelLayout, monkeypatch
) -> None:
    monkeypatch.setattr(puller_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(puller_module, "SILENCE_POLL_S", 0.02)

    class OneSilent(Scripted):
        def pull(self, *asked: object) -> Scripted | Silent:
            super().pull()
            return Silent(good[:num_messages]) if self.num_pulls == 1 else self

    store = OneSilent(good)
    assert isinstance(outcome_of(store, layout), PullDone)
    assert store.num_pulls == 2


def test_an_image_goes_on_only_with_its_size(good: list[PullMessage], layout: ModelLayout) -> None:
    """The memory that was granted has no other."""
    header, *others = good
    assert isinstance(header, ImageHeader)
    grown = replace(header, total_bytes=header.total_bytes + 256)

    class Grown(Scripted):
        def __iter__(self) -> Generator[PullMessage]:
            yield from self.messages if self.num_pulls == 1 else [grown, *others]

    event = outcome_of(Grown(good[:-1]), layout)
    assert isinstance(event, PullFailed)
    assert isinstance(event.error, CorruptImage)


def test_only_pull_threads_have_low_priority(store, layout) -> None:
    store.add("aaaa")
    nicenesses: list[int] = []

    def check(header: ImageHeader) -> None:
        thread_id = threading.get_native_id()
        nicenesses.append(os.getpriority(os.PRIO_PROCESS, thread_id))

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    events: queue.SimpleQueue[PullEvent] = queue.SimpleQueue()
    puller = Puller(store, 1, events.put, check, lambda header, read: None)
    job = PullJob("aaaa", LAYOUT_ID)
    puller.start(job)
    events.get(timeout=TIMEOUT_S)
    puller.cancel(job)
    puller.close()
    assert nicenesses == [PULL_NICENESS]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


class TwoSources(MemoryStore):
    """Two replicas, of which "one" falls silent after `num_messages`: `silent` is its last stream.
    `tried` are the sources in order."""

    def __init__(self, num_messages: int) -> None:
        super().__init__()
        self.num_messages = num_messages
        self.tried: list[str] = []
        self.silent = Silent([])

    def pull(
        self, digest: str, layout_id: str, offset: int = 0, image_id: str = "", avoid: object = ()
    ) -> Silent | MemoryStream:
        assert isinstance(avoid, frozenset)
        good = super().pull(digest, layout_id, offset, image_id)
        good.source = "two" if "one" in avoid else "one"
        found = good if good.source == "two" else Silent(list(good)[: self.num_messages])
        if isinstance(found, Silent):
            found.source = "one"
            self.silent = found
        self.tried.append(good.source)  # last: the test reads `silent` once this has grown
        return found


@pytest.mark.parametrize("num_messages", [0, 1, 3])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_silent_source_is_tried_last(
    num_messages: int, host_bytes: int, layout: ModelLayout
) -> None:
    store = TwoSources(num_messages)
    store.add("aaaa")
    loop = Loop(store, layout, 16384, host_bytes)
    residency = loop.residency
    for _ in range(2):  # whoever goes before that blames nobody, however long this machine takes
        residency.add_waiter("aaaa", time.monotonic())
        loop.until(lambda: loop.puller._active and residency.loads["aaaa"].job._stream is not None)
        residency.remove_waiter("aaaa")
        loop.until(lambda: residency.loads.num_jobs == 0)
    assert store.tried == ["one", "one"]
    residency.loader.stall_s = 0.3
    residency.add_waiter("aaaa", time.monotonic())
    loop.until(lambda: len(store.tried) == 3 and store.silent.fell_silent.is_set())
    expires_s = time.monotonic() + residency.loader.stall_s
    loop.until(lambda: time.monotonic() > expires_s)
    residency.remove_waiter("aaaa", expired=True)
    loop.until(lambda: residency.loads.num_jobs == 0)
    assert_computes(loop, store, "aaaa", loop.load("aaaa"))
    residency.release("aaaa")
    residency.unload("aaaa")
    assert_computes(loop, store, "aaaa", loop.load("aaaa"))
    assert store.tried == ["one", "one", "one", "two", "two"]
    loop.puller.close()


def test_silence_is_forgotten_in_time(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pull_job_module, "time", SimpleNamespace(monotonic=clock))
    silent = SilentSources()
    job = PullJob("aaaa", LAYOUT_ID, frozenset({"one"}))
    stream = Silent([])
    stream.source = "two"
    job.attach(stream)
    silent.record_abandoned(job, 60.0)
    assert silent.avoided_for("aaaa") == {"one"}
    silent.record_abandoned(job, 0.0)
    assert silent.avoided_for("aaaa") == {"one", "two"}
    assert silent.avoided_for("bbbb") == frozenset()
    clock.now_s += pull_job_module.AVOID_S
    assert silent.avoided_for("aaaa") == frozenset()


def test_all_silent_are_tried_again() -> None:
    job = PullJob("aaaa", LAYOUT_ID, frozenset({"one", "two"}))
    stream = Silent([])
    stream.source = "one"
    job.attach(stream)
    assert job.bad_sources(0.0) == {"one"}
