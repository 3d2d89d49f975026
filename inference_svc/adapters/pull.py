"""One pull: what is verified so far, where the bytes go, and what it says to the engine."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from inference_svc.adapters.extents import Extent
from inference_svc.adapters.image_source import ImageHeader, PullStream
from servicekit.errors import ServiceError
from servicekit.telemetry.spans import CANCELLED, OpenSpan, Span, use_span

PULL_METHOD = "loadout.adapter_store.v1.AdapterStoreService/PullAdapter"
"""As traces name it."""


class ImageSink:
    """Writes image bytes to where their extents lie in `memory`, a writable byte view."""

    def __init__(self, memory: memoryview, extents: Sequence[Extent]) -> None:
        self._memory = memory
        self._extents = sorted(extents, key=lambda extent: extent.image_offset)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """The bytes must lie within the image."""
        view, written = memoryview(data), 0
        for extent in self._extents:
            start = max(offset, extent.image_offset)
            end = min(offset + len(data), extent.image_offset + extent.num_bytes)
            if start < end:
                at = extent.start + start - extent.image_offset
                self._memory[at : at + end - start] = view[start - offset : end - offset]
                written += end - start
        assert written == len(data), "bytes outside the image's extents"


@dataclass
class Progress:
    """What of an image is verified: `offset` bytes, in parts of these hashes. `sink` is where they
    went; without one the image waits for room. `avoid` are sources that have failed this pull."""

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

    def blame_source(self) -> None:
        """The next attempt goes elsewhere; once all have failed in turn, it begins anew."""
        self.avoid = _with(self.source, self.avoid)


def _with(source: str, avoid: frozenset[str]) -> frozenset[str]:
    return frozenset({source}) if source in avoid else avoid | {source}


class _NoRoom:
    """The answer to a pull that waits for room."""


class Parked(Exception):
    """No room came in time; whoever grants it queues the job again."""


class PullJob:
    """One digest on its way. The engine's thread owns it together with the puller; `progress`
    belongs to the pull thread that works on it.

    `last_progress_s` is when bytes last arrived, on the monotonic clock. `avoid` are sources to be
    asked last. `trace` is set where it is traced: each attempt is then one of `spans`.
    """

    def __init__(self, digest: str, layout_id: str, avoid: frozenset[str] = frozenset()) -> None:
        self.digest = digest
        self.layout_id = layout_id
        self.progress = Progress(avoid=avoid)
        self.trace: OpenSpan | None = None
        self.spans: list[Span] = []
        self.last_progress_s = time.monotonic()
        self._grants: queue.SimpleQueue[ImageSink | _NoRoom | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._stream: PullStream | None = None
        self._attached_s = 0.0
        self._is_parked = False

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def grant(self, sink: ImageSink) -> bool:
        """Room for the image. True: the job is parked, and must be queued again."""
        with self._lock:
            self._grants.put(sink)
            was_parked, self._is_parked = self._is_parked, False
            return was_parked

    def park(self) -> None:
        """There is no room now: a thread that waits for it gives up at once."""
        with self._lock:
            if not self._is_parked:
                self._grants.put(_NoRoom())

    def cancel(self) -> bool:
        """Ends the pull. True: it is parked, so that nobody will report its end."""
        self._cancelled.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        with self._lock:
            self._grants.put(None)
            was_parked, self._is_parked = self._is_parked, False
            return was_parked

    def attach(self, stream: PullStream) -> None:
        self._attached_s = time.monotonic()
        self._stream = stream
        if self.is_cancelled:
            stream.cancel()

    def detach(self) -> None:
        """Nothing is to come from the stream any more."""
        self._stream = None

    def leave_if_silent(self, seconds: float) -> bool:
        """Ends the stream if nothing came for so long; the pull goes on with another."""
        stream = self._silent_stream(seconds)
        if stream is None:
            return False
        self._stream = None
        stream.cancel()
        return True

    def bad_sources(self, seconds: float) -> frozenset[str]:
        """Those that failed this pull, and one that is asked and sent nothing for so long."""
        stream = self._silent_stream(seconds)
        avoid = self.progress.avoid
        return avoid if stream is None else _with(stream.source, avoid)

    def _silent_stream(self, seconds: float) -> PullStream | None:
        stream = self._stream
        since_s = max(self._attached_s, self.last_progress_s)
        return None if time.monotonic() - since_s < seconds else stream

    def wait_for_grant(self, timeout_s: float) -> ImageSink | None:
        """The room granted, or None if the job is cancelled. Raises Parked if neither came in
        time: the job is no longer the caller's."""
        answer: ImageSink | _NoRoom | None = _NoRoom()
        with contextlib.suppress(queue.Empty):
            answer = self._grants.get(timeout=timeout_s)
        with self._lock:
            while isinstance(answer, _NoRoom):
                if self._grants.empty():
                    self._is_parked = True
                    raise Parked
                answer = self._grants.get()
        return answer

    @contextlib.contextmanager
    def attempting(self) -> Iterator[None]:
        """An attempt, as a span: what is asked of the store meanwhile is a part of it."""
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

    def wait_before_retry(self, delay_s: float) -> None:
        self._cancelled.wait(delay_s)


@dataclass(frozen=True, slots=True)
class PullOpened:
    """The size is known; the job waits for room. Comes again if the image's identity changed, and
    then the earlier grant is void."""

    job: PullJob
    header: ImageHeader


@dataclass(frozen=True, slots=True)
class PullDone:
    """Every byte is in the granted memory and verified."""

    job: PullJob


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The job writes no more. `error` is None when it was cancelled."""

    job: PullJob
    error: ServiceError | None


PullEvent = PullOpened | PullDone | PullFailed


AVOID_S = 300.0
"""A source that was silent for long has had time to recover."""
SILENT_SHARE = 0.8
"""Of the time that requests wait: a source may have been asked when that had begun."""


@dataclass
class SilentSources:
    """What abandoned pulls have learned, for the next pulls of the same digest.

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
