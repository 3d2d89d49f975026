"""Pulls images from the store in threads of its own; the engine hears of them by messages.

A pull asks for room when it knows the image's size (`PullOpened`), waits for the engine's grant,
then writes straight into the granted memory, verifying every part before it counts. A lost
stream is resumed at the last verified part.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inference_svc.adapters.extents import Extent
from inference_svc.adapters.store import (
    AdapterStore,
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    PullStream,
)
from inference_svc.errors import CorruptImage, InferenceError, StoreUnavailable

RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class ImageSink:
    """Writes image bytes to where their extents lie in `memory`, a writable byte view."""

    def __init__(self, memory: memoryview, extents: Sequence[Extent]) -> None:
        self._memory = memory
        self._extents = sorted(extents, key=lambda extent: extent.image_offset)

    def write(self, offset: int, data: bytes) -> None:
        for extent in self._extents:
            start = max(offset, extent.image_offset)
            end = min(offset + len(data), extent.image_offset + extent.num_bytes)
            if start < end:
                at = extent.start + start - extent.image_offset
                self._memory[at : at + end - start] = memoryview(data)[
                    start - offset : end - offset
                ]


@dataclass(eq=False)
class PullJob:
    """One digest on its way. `grant` and `cancel` belong to the engine's thread."""

    digest: str
    layout_id: str
    _grants: queue.SimpleQueue[ImageSink | None] = field(default_factory=queue.SimpleQueue)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _stream: PullStream | None = None

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def grant(self, sink: ImageSink) -> None:
        self._grants.put(sink)

    def cancel(self) -> None:
        """Ends the pull; its PullFailed, without error, says when it no longer writes."""
        self._cancelled.set()
        self._grants.put(None)
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def attach(self, stream: PullStream) -> None:
        self._stream = stream
        if self.is_cancelled:
            stream.cancel()

    def wait_for_grant(self) -> ImageSink | None:
        sink = self._grants.get()
        return None if self.is_cancelled else sink

    def wait_before_retry(self, delay_s: float) -> None:
        self._cancelled.wait(delay_s)


@dataclass(frozen=True, slots=True)
class PullOpened:
    """The size is known; the job waits for `grant`. Comes again if the image's identity changed,
    and then the earlier grant is void."""

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
    error: InferenceError | None


PullEvent = PullOpened | PullDone | PullFailed


@dataclass
class _Progress:
    """What of an image is verified: `offset` bytes, in parts of these hashes."""

    image_id: str = ""
    offset: int = 0
    part_hashes: list[bytes] = field(default_factory=list)
    sink: ImageSink | None = None
    num_corrupt: int = 0


class _Cancelled(Exception):
    pass


class Puller:
    """A fixed number of threads that pull, started once.

    `post` is called from them with PullEvents and must be thread-safe. `check_header` raises
    CorruptImage for a header that does not fit the layout.
    """

    def __init__(
        self,
        store: AdapterStore,
        num_workers: int,
        post: Callable[[PullEvent], None],
        check_header: Callable[[ImageHeader], None],
    ) -> None:
        self._store = store
        self._post = post
        self._check_header = check_header
        self._jobs: queue.SimpleQueue[PullJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"loadout-pull-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, digest: str, layout_id: str) -> PullJob:
        job = PullJob(digest, layout_id)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Ends the threads; every job must have been cancelled before."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._post(self._pull(job))

    def _pull(self, job: PullJob) -> PullDone | PullFailed:
        progress = _Progress()
        attempt = 0
        while not job.is_cancelled:
            verified = progress.offset
            try:
                self._stream(job, progress)
                return PullDone(job)
            except _Cancelled:
                break
            except CorruptImage as error:
                progress.num_corrupt += 1
                if progress.num_corrupt > 1:
                    return PullFailed(job, error)
            except StoreUnavailable:
                attempt = 0 if progress.offset > verified else attempt + 1
                job.wait_before_retry(RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S) - 1)])
            except InferenceError as error:
                return PullFailed(job, error)
            except Exception as error:  # a bug here must not strand the requests that wait
                return PullFailed(job, InferenceError(f"pull failed: {error!r}"))
        return PullFailed(job, None)

    def _stream(self, job: PullJob, progress: _Progress) -> None:
        """Pulls until the trailer; raises what ended it before."""
        stream = self._store.pull(job.digest, job.layout_id, progress.offset, progress.image_id)
        job.attach(stream)
        try:
            messages = iter(stream)
            self._open(job, next(messages, None), progress)
            hasher = hashlib.sha256()
            position = progress.offset
            for message in messages:
                if isinstance(message, ImageChunk):
                    position = _write(progress, message, position)
                    hasher.update(message.data)
                elif isinstance(message, LayerEnd):
                    _end_part(progress, message, position, hasher.digest())
                    hasher = hashlib.sha256()
                else:
                    return _check_trailer(progress, message)
        finally:
            stream.cancel()
        raise StoreUnavailable("the image stream ended before its trailer")

    def _open(self, job: PullJob, header: PullMessage | None, progress: _Progress) -> None:
        if not isinstance(header, ImageHeader):
            raise StoreUnavailable("the image stream ended before its header")
        resumes = progress.sink is not None and header.image_id == progress.image_id
        if resumes and header.offset == progress.offset:
            return
        if header.offset != 0 or (header.digest, header.layout_id) != (job.digest, job.layout_id):
            raise CorruptImage("the store sent another image than was asked for")
        self._check_header(header)
        self._post(PullOpened(job, header))
        sink = job.wait_for_grant()
        if sink is None:
            raise _Cancelled
        progress.image_id, progress.offset, progress.sink = header.image_id, 0, sink
        progress.part_hashes = []


def _write(progress: _Progress, chunk: ImageChunk, position: int) -> int:
    if chunk.offset != position:
        raise CorruptImage(f"image bytes at {chunk.offset} where {position} was due")
    assert progress.sink is not None
    progress.sink.write(chunk.offset, chunk.data)
    return position + len(chunk.data)


def _end_part(progress: _Progress, end: LayerEnd, position: int, sha256: bytes) -> None:
    if end.end_offset != position or end.sha256 != sha256:
        raise CorruptImage(f"part {end.part} of the image fails its sha256")
    progress.part_hashes.append(sha256)
    progress.offset = position


def _check_trailer(progress: _Progress, trailer: PullMessage) -> None:
    total = hashlib.sha256(b"".join(progress.part_hashes)).digest()
    if not isinstance(trailer, ImageTrailer) or trailer.sha256 != total:
        raise CorruptImage("the image fails its trailer's sha256")
