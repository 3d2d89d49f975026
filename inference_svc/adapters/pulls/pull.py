"""One pull: its verified progress, the memory that it writes to, and its events for the engine."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from contract.images.header import ImageHeader
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.pulls.image_source import MappedImage, PullStream
from inference_svc.adapters.pulls.registration import RegisteredImage
from inference_svc.errors import StoreUnavailable, notes_of
from servicekit.errors import ServiceError
from servicekit.telemetry.spans import CANCELLED, OpenSpan, Span, use_span

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""A mapped image is copied and hashed in such pieces, which fit a core's cache. Threads wait for
each other between smaller ones. A paced pull pauses between them."""

PULL_METHOD = "loadout.adapter_store.v1.AdapterStoreService/PullAdapter"
"""The RPC's name in traces."""


class ImageSink:
    """Writes image bytes to where their extents lie in `memory`, a writable byte view."""

    def __init__(self, memory: memoryview, extents: Sequence[Extent]) -> None:
        self._memory = memory
        self._bytes = np.frombuffer(memory, np.uint8)
        self.extents = sorted(extents, key=lambda extent: extent.image_offset)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Writes bytes that must lie within the image. Lets other threads run meanwhile."""
        view, written = np.frombuffer(data, np.uint8), 0
        for extent in self.extents:
            start = max(offset, extent.image_offset)
            end = min(offset + len(data), extent.image_offset + extent.num_bytes)
            if start < end:
                at = extent.start + start - extent.image_offset
                self._bytes[at : at + end - start] = view[start - offset : end - offset]
                written += end - start
        assert written == len(data), "bytes outside the image's extents"

    def views(self, start: int, end: int) -> list[memoryview]:
        """Returns the memory of the image's bytes [start, end), in order."""
        found = []
        for extent in self.extents:
            first = max(start, extent.image_offset)
            last = min(end, extent.image_offset + extent.num_bytes)
            if first < last:
                at = extent.start + first - extent.image_offset
                found.append(self._memory[at : at + last - first])
        return found

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        """Yields the image's bytes [start, end), which were written, in order."""
        yield from self.views(start, end)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Returns bytes of the image that were written; they lie within one extent."""
        for extent in self.extents:
            start = offset - extent.image_offset
            if start >= 0 and start + num_bytes <= extent.num_bytes:
                return bytes(self._memory[extent.start + start :][:num_bytes])
        raise AssertionError("bytes outside the image's extents")


class MappedPlace:
    """A mapped image, whose bytes are not sent. With a `sink` they are copied there when they are
    checked, in any order. See `ImageSink`."""

    def __init__(self, image: MappedImage, sink: ImageSink | None = None) -> None:
        self._image = image
        self._sink = sink

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        """Yields the bytes [start, end) in order, where they are to be checked: in the sink, if
        there is one. A piece has just been copied, and lies in the core's cache."""
        for first in range(start, end, PIECE_BYTES):
            last = min(end, first + PIECE_BYTES)
            if self._sink is None:
                yield self._image.data[first:last]
                continue
            position = first
            for view in self._sink.views(first, last):
                self._image.copy(position, view)
                position += len(view)
                yield view

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self._image.data[offset : offset + num_bytes])


@dataclass
class Progress:
    """The verified part of an image: `offset` bytes, in parts with these hashes.

    `sink` is where they were written; None until memory is granted. `avoid` are the sources that
    have failed this pull.
    """

    header: ImageHeader | None = None
    offset: int = 0
    part_hashes: list[bytes] = field(default_factory=list)
    sink: ImageSink | None = None
    num_corrupt: int = 0
    source: str = ""
    avoid: frozenset[str] = frozenset()

    def begin(self, header: ImageHeader) -> None:
        self.header, self.offset, self.part_hashes, self.sink = header, 0, [], None

    def restart(self) -> None:
        self.offset, self.part_hashes = 0, []

    def avoid_source(self) -> None:
        """Makes the next attempt use another source; once all have failed, any."""
        self.avoid = _with(self.source, self.avoid)


def _with(source: str, avoid: frozenset[str]) -> frozenset[str]:
    return frozenset({source}) if source in avoid else avoid | {source}


class _Denied:
    """Answers a thread that waits for a grant: there is no memory now."""


class Parked(Exception):
    """Ends an attempt whose grant did not come in time; `PullJob.grant` resumes the job."""


class PullJob:
    """One image being pulled. The engine's thread and the puller share it; `progress` belongs to
    the pull thread that works on it.

    `last_progress_s` is when bytes last arrived, on the monotonic clock. `avoid` are sources to be
    tried last. `failure` is how the store has failed it since `failed_s`, without a byte since;
    None while bytes come. `trace` is set where the load is traced: each attempt is then one of
    `spans`.
    """

    def __init__(self, digest: str, layout_id: str, avoid: frozenset[str] = frozenset()) -> None:
        self.digest = digest
        self.layout_id = layout_id
        self.progress = Progress(avoid=avoid)
        self.trace: OpenSpan | None = None
        self.spans: list[Span] = []
        self.last_progress_s = time.monotonic()
        self.failure: StoreUnavailable | None = None
        self.failed_s = 0.0
        self._grants: queue.SimpleQueue[ImageSink | _Denied | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._stream: PullStream | None = None
        self._attached_s = 0.0
        self._is_parked = False

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def grant(self, sink: ImageSink) -> bool:
        """Grants memory for the image; returns whether the job is parked and must be requeued."""
        with self._lock:
            self._grants.put(sink)
            was_parked, self._is_parked = self._is_parked, False
            return was_parked

    def park(self) -> None:
        """Ends a thread's wait for a grant at once, as there is no memory now."""
        with self._lock:
            if not self._is_parked:
                self._grants.put(_Denied())

    def cancel(self) -> bool:
        """Ends the pull; returns whether it is parked, so that no thread will report its end."""
        self._cancelled.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        with self._lock:
            self._grants.put(None)
            was_parked, self._is_parked = self._is_parked, False
            return was_parked

    def on_message(self) -> None:
        """Records that bytes, or a size, came."""
        self.last_progress_s = time.monotonic()
        self.failure = None

    def on_failure(self, failure: StoreUnavailable) -> None:
        """Records that the store failed an attempt; logs the first failure, with the source."""
        if self.is_cancelled:
            return  # this is how its stream ends
        if not self.failed_s:
            facts = {"digest": self.digest, "source": self.progress.source}
            facts["notes"] = notes_of(failure)
            logger.warning("pull: %s; trying again", failure.message, extra=facts)
        if self.failure is None:
            self.failed_s = time.monotonic()
        self.failure = failure

    def attach(self, stream: PullStream) -> None:
        self._attached_s = time.monotonic()
        self._stream = stream
        if self.is_cancelled:
            stream.cancel()

    def detach(self) -> None:
        """Forgets the stream, which has ended."""
        self._stream = None

    def end_silent_stream(self, seconds: float) -> bool:
        """Ends the stream if nothing arrived for so long; the pull continues with another."""
        stream = self._silent_stream(seconds)
        if stream is None:
            return False
        self._stream = None
        stream.cancel()
        return True

    def bad_sources(self, seconds: float) -> frozenset[str]:
        """Returns the sources that failed this pull, and the current one if it was silent so
        long."""
        stream = self._silent_stream(seconds)
        avoid = self.progress.avoid
        return avoid if stream is None else _with(stream.source, avoid)

    def _silent_stream(self, seconds: float) -> PullStream | None:
        stream = self._stream
        since_s = max(self._attached_s, self.last_progress_s)
        return None if time.monotonic() - since_s < seconds else stream

    def wait_for_grant(self, timeout_s: float) -> ImageSink | None:
        """Returns the memory granted, or None if the job is cancelled. Raises Parked if neither
        happens in time: the job is no longer the caller's then."""
        answer: ImageSink | _Denied | None = _Denied()
        with contextlib.suppress(queue.Empty):
            answer = self._grants.get(timeout=timeout_s)
        with self._lock:
            while isinstance(answer, _Denied):
                if self._grants.empty():
                    self._is_parked = True
                    raise Parked
                answer = self._grants.get()
        return answer

    @contextlib.contextmanager
    def traced_attempt(self) -> Iterator[None]:
        """Records an attempt as a span, the parent of calls to the store within it."""
        if self.trace is None:
            yield
            return
        verified = self.progress.offset
        span = self.trace.child(PULL_METHOD, "client")
        span.attributes.update({"rpc.system.name": "grpc", "rpc.method": PULL_METHOD})
        span.record = self.spans.append
        try:
            with use_span(span):
                yield
        except Parked:
            span.set_attributes(parked=True)
            raise
        except ServiceError as error:
            span.fail(error)
            raise
        finally:
            if self.is_cancelled:
                span.error, span.attributes[CANCELLED] = "", True
            span.set_attributes(replica=self.progress.source, offset=verified)
            span.set_attributes(bytes=self.progress.offset - verified, digest=self.digest)
            span.end()

    def pause(self, seconds: float) -> None:
        """Waits so long, or until the job is cancelled."""
        if seconds > 0:
            self._cancelled.wait(seconds)


@dataclass(frozen=True, slots=True)
class PullOpened:
    """Reports that the size is known and the job waits for a grant. Posted again if the image's
    identity changed; the earlier grant is void then."""

    job: PullJob
    header: ImageHeader


@dataclass(frozen=True, slots=True)
class PullDone:
    """Reports that every byte is verified and in the granted memory; or, if the image is
    `registered`, on its way there, until PullFilled."""

    job: PullJob
    registered: RegisteredImage | None = None


@dataclass(frozen=True, slots=True)
class PullFilled:
    """Reports that every byte of a registered image is in the granted memory, too."""

    job: PullJob


@dataclass(frozen=True, slots=True)
class PullFailed:
    """Reports that the job writes no more. `error` is None when it was cancelled."""

    job: PullJob
    error: ServiceError | None


PullEvent = PullOpened | PullDone | PullFilled | PullFailed


AVOID_S = 300.0
"""Time that a silent source gets to recover before it is tried first again."""
SILENT_SHARE = 0.8
"""Part of the time that requests wait after which a source counts as silent: the attempt may have
started later than the wait."""


@dataclass
class SilentSources:
    """Facts that abandoned pulls have learned, for the next pulls of the same digest.

    Else each would try the same silent source first, in vain: requests wait for less long than a
    source may be silent before the pull itself leaves it.
    """

    _by_digest: dict[str, tuple[frozenset[str], float]] = field(default_factory=dict)

    def record_abandoned(self, job: PullJob, wait_s: float) -> None:
        """Records the bad sources of a pull that nobody waits for any more; requests wait for at
        most `wait_s`."""
        sources = job.bad_sources(SILENT_SHARE * wait_s)
        if sources:
            now_s = time.monotonic()
            self._by_digest = {d: bad for d, bad in self._by_digest.items() if bad[1] > now_s}
            self._by_digest[job.digest] = (sources, now_s + AVOID_S)

    def avoided_for(self, digest: str) -> frozenset[str]:
        """Returns the sources to be tried last."""
        bad, until_s = self._by_digest.get(digest, (frozenset(), 0.0))
        return bad if time.monotonic() < until_s else frozenset()
