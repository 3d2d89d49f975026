"""Pulls images from the store in threads of its own, which report to the engine by events.

A pull posts `PullOpened` when it knows the image's size, waits for the engine's grant of memory,
then writes straight into it, verifying every part before it counts. A lost stream is resumed at the
last verified part, from another replica of the store if there is one. A pull that gets no grant
soon is parked: it frees its thread, and restarts its stream when there is memory. Of a large image
the rest comes at a `PullPace`, if the model computes on the same processors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from contract.images.header import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    trailer_sha256,
)
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.pulls.image_source import AdapterStore, MappedImage
from inference_svc.adapters.pulls.pace import PullPace
from inference_svc.adapters.pulls.part_checks import PartChecks, PartHashers
from inference_svc.adapters.pulls.pull import (
    ImageSink,
    MappedPlace,
    Parked,
    Progress,
    PullDone,
    PullEvent,
    PullFailed,
    PullFilled,
    PullJob,
    PullOpened,
)
from inference_svc.adapters.pulls.registration import RegisteredImage, Registrations
from inference_svc.errors import CorruptImage, StoreUnavailable
from inference_svc.host.cpus import usable_cpus
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0)
PARK_AFTER_S = 0.05
"""How long a thread waits for a grant: longer than a step, shorter than a generation."""
SILENCE_S = 15.0
"""How long a connected source may send nothing before another is tried: longer than a store lets a
pull wait for memory, for another replica and for a compiler together."""
SILENCE_POLL_S = 0.5
PULL_NICENESS = 5
"""Niceness of pull threads: a third of an ordinary thread's time on a core that both need."""
MAX_HASHERS = 4
"""Threads that hash images; on fewer cores as many as there are."""
MAX_CORRUPT = 2
"""Attempts whose bytes fail their hash before the pull fails."""


class Cancelled(Exception):
    """Ends an attempt: the job was cancelled while it waited for memory."""


CheckContents = Callable[[ImageHeader, Callable[[int, int], bytes]], None]
"""Checks the facts that only the bytes of an image show, which it reads by offset and size: raises
CorruptImage or AdapterUnusable."""


class OtherRanks(Protocol):
    """The pulls of other ranks, of their parts of the same adapters."""

    def set_layouts(self, layout_ids: tuple[str, ...]) -> None:
        """Notes the ids of the other ranks' layouts, by rank."""

    def open(self, job: PullJob, header: ImageHeader) -> ImageHeader:
        """Returns the header of the image of all stages, of which this rank's is the first part. It
        waits for the stages that come after. Any earlier pulls end first. Raises ServiceError that
        fails the job, and Cancelled."""

    def begin(self, job: PullJob, header: ImageHeader, extents: tuple[Extent, ...]) -> None:
        """Begins the pulls of a job that is open and was granted these extents, of all stages. Any
        earlier ones end first."""

    def finish(
        self, job: PullJob, event: PullDone | PullFailed | None
    ) -> PullDone | PullFailed | None:
        """Returns the end of a job on all ranks: `event`, this rank's, or another rank's failure.
        No rank writes any more, unless all are done. None: the job is parked."""

    def abandon(self, job: PullJob) -> None:
        """Ends the pulls of a job that is cancelled while it is parked."""


class Puller:
    """Pulls with a fixed number of threads. `others` are the other ranks', if there are any. With
    `registrations` a device copies large images that the store shares from where they are mapped,
    before they are in the granted memory.

    `post` is called from them with PullEvents and must be thread-safe. `read_header` raises
    CorruptImage for a header that does not fit the layout.
    """

    def __init__(
        self,
        store: AdapterStore,
        num_workers: int,
        post: Callable[[PullEvent], None],
        read_header: Callable[[ImageHeader], ImageHeader],
        check_contents: CheckContents,
        pace: PullPace | None = None,
        others: OtherRanks | None = None,
        registrations: Registrations | None = None,
    ) -> None:
        assert others is None or registrations is None, "ranks land images themselves"
        self.num_workers = num_workers
        self.others = others
        self.registrations = registrations
        self._store = store
        self._post = post
        self._read_header = read_header
        self._check_contents = check_contents
        self._pace = pace
        self._hashers = PartHashers(min(MAX_HASHERS, usable_cpus()), _lower_priority)
        self._jobs: queue.SimpleQueue[PullJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"loadout-pull-{i}", daemon=True)
            for i in range(num_workers)
        ]
        # Twice while one thread parks a job and another goes on with it.
        self._active: list[PullJob] = []
        self._closing = threading.Event()
        self._threads.append(
            threading.Thread(target=self._watch, name="loadout-pull-watch", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def start(self, job: PullJob) -> None:
        """Queues a new job, or a parked job that was granted room."""
        self._jobs.put(job)

    def cancel(self, job: PullJob) -> None:
        """Ends a job; its PullFailed, without an error, is posted once it no longer writes."""
        if job.cancel():
            if self.others is not None:
                self.others.abandon(job)
            self._post(PullFailed(job, None))

    def close(self) -> None:
        """Ends the threads; every job must have been cancelled before."""
        self._closing.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._hashers.close()
        if self.registrations is not None:
            self.registrations.close()

    def _work(self) -> None:
        _lower_priority()
        while (job := self._jobs.get()) is not None:
            self._active.append(job)
            event = self._pull(job)
            if self.others is not None:
                event = self.others.finish(job, event)
            self._active.remove(job)
            if event is not None:
                self._post(event)
            if isinstance(event, PullDone) and event.registered is not None:
                self._fill(job, event.registered)

    def _watch(self) -> None:
        """Ends silent streams; their own threads only wait for the next message."""
        while not self._closing.wait(SILENCE_POLL_S):
            for job in list(self._active):
                if job.end_silent_stream(SILENCE_S):
                    facts = {"digest": job.digest, "seconds": SILENCE_S}
                    logger.warning("pull: source is silent", extra=facts)

    def _pull(self, job: PullJob) -> PullDone | PullFailed | None:
        """Works on a job until it ends; returns None if it is parked."""
        num_failed = 0
        while not job.is_cancelled:
            verified = job.progress.offset
            try:
                with job.traced_attempt():
                    registered = self.pull_once(job)
                return PullDone(job, registered)
            except Parked:
                return None
            except Cancelled:
                break
            except StoreUnavailable as error:
                job.on_failure(error)
                job.progress.avoid_source()
                num_failed = 0 if job.progress.offset > verified else num_failed
                delay_s = RETRY_DELAYS_S[min(num_failed, len(RETRY_DELAYS_S) - 1)]
                num_failed += 1
                job.pause(delay_s)
            except CorruptImage as error:
                facts = {"digest": job.digest, "why": error.message}
                logger.warning("pull: bytes that fail their hash", extra=facts)
                job.progress.avoid_source()
                job.progress.num_corrupt += 1
                if job.progress.num_corrupt >= MAX_CORRUPT:
                    return PullFailed(job, error)
            except ServiceError as error:
                return PullFailed(job, error)
            except Exception as error:  # a bug here must not strand the requests that wait
                logger.exception("pull failed", extra={"digest": job.digest})
                return PullFailed(job, ServiceError(f"pull failed: {error!r}"))
        return PullFailed(job, None)

    def pull_once(self, job: PullJob) -> RegisteredImage | None:
        """Pulls until the trailer, in the calling thread; raises the error that ended it before.
        Returns the image if it is registered: the granted memory has nothing of it yet."""
        progress = job.progress
        if progress.header is not None and progress.sink is None:
            progress.sink = self._wait_for_room(job, progress.header)  # granted while parked
        image_id = "" if progress.header is None else progress.header.image_id
        stream = self._store.pull(
            job.digest, job.layout_id, progress.offset, image_id, progress.avoid
        )
        progress.source = stream.source
        job.attach(stream)
        messages = iter(stream)
        try:
            self._open(job, next(messages, None))
            assert progress.sink is not None
            if stream.mapped is None:
                self._receive(job, messages, progress.sink)
                return None
            return self._take_mapped(job, messages, stream.mapped, progress.sink)
        finally:
            job.detach()
            stream.cancel()
            messages.close()  # not later: an error keeps it, and it may keep the store's memory

    def _receive(
        self, job: PullJob, messages: Iterator[PullMessage], place: ImageSink | MappedPlace
    ) -> None:
        """Takes the messages after the header, and verifies the bytes in their place."""
        progress = job.progress
        pieces = place.pieces
        if isinstance(place, MappedPlace):
            pieces = partial(_mapped_pieces, job, place)
        with PartChecks(progress, self._hashers, pieces) as checks:
            position = progress.offset
            for message in messages:
                job.on_message()
                if isinstance(message, ImageChunk) and isinstance(place, ImageSink):
                    position = _write(progress, place, message, position)
                    self._pause(job, position, len(message.data))
                elif isinstance(message, LayerEnd):
                    pause = None
                    if isinstance(place, MappedPlace):
                        position = message.end_offset
                        if self._pace is not None and self._pace.applies(position):
                            pause = partial(self._pause, job, position)
                    checks.add(message, position, pause)
                else:
                    checks.finish()
                    _check_trailer(progress, message, position)
                    assert progress.header is not None
                    self._check_contents(progress.header, place.read)
                    return
        raise StoreUnavailable("the adapter store breaks off before it has sent all of it")

    def _pause(self, job: PullJob, position: int, num_bytes: int) -> None:
        """Waits as the pace demands after `num_bytes` that end at `position` of the image."""
        if self._pace is not None:
            job.pause(self._pace.delay_s(position, num_bytes))

    def _take_mapped(
        self,
        job: PullJob,
        messages: Iterator[PullMessage],
        image: MappedImage,
        sink: ImageSink,
    ) -> RegisteredImage | None:
        """Verifies a mapped image, and copies it or registers it."""
        image.hold()
        try:
            if self.registrations is not None and self.registrations.admit(len(image.data)):
                return self._verify_mapped(job, messages, image, self.registrations)
            self._receive(job, messages, MappedPlace(image, sink))
            return None
        finally:
            image.release()

    def _verify_mapped(
        self,
        job: PullJob,
        messages: Iterator[PullMessage],
        image: MappedImage,
        registrations: Registrations,
    ) -> RegisteredImage | None:
        """Verifies an image where it is mapped, and registers it meanwhile. If the device refuses
        it, its bytes are in the granted memory as ever."""
        progress, is_verified = job.progress, False
        registering = self._hashers.run(partial(registrations.register, image))
        try:
            self._receive(job, messages, MappedPlace(image))
            is_verified = True
        finally:
            registered = registering.result()
            if not is_verified:
                progress.restart()  # the granted memory has none of it
                if registered is not None:
                    registered.release()
        if registered is None:
            assert progress.sink is not None
            progress.sink.write(0, image.data)
        return registered

    def _fill(self, job: PullJob, registered: RegisteredImage) -> None:
        """Copies a registered image to the granted memory, for the time when it is unmapped."""
        assert job.progress.sink is not None
        job.progress.sink.write(0, registered.data)
        registered.release()
        self._post(PullFilled(job))

    def _open(self, job: PullJob, header: PullMessage | None) -> None:
        """Checks that the stream resumes at the requested offset; restarts the image if not."""
        progress = job.progress
        if not isinstance(header, ImageHeader):
            raise StoreUnavailable("the adapter store breaks off before it has sent anything of it")
        if progress.sink is not None and _is_same(progress.header, header):
            if header.offset == 0:
                progress.restart()
            if header.offset == progress.offset:
                return
        if header.offset != 0 or (header.digest, header.layout_id) != (job.digest, job.layout_id):
            raise CorruptImage("the store sent another image than was requested")
        header = self._read_header(header)
        job.on_message()
        progress.begin(header)
        whole = header if self.others is None else self.others.open(job, header)
        self._post(PullOpened(job, whole))
        progress.sink = self._wait_for_room(job, header)

    def _wait_for_room(self, job: PullJob, header: ImageHeader) -> ImageSink:
        sink = job.wait_for_grant(PARK_AFTER_S)
        if sink is None:
            raise Cancelled
        if self.others is not None:
            self.others.begin(job, header, tuple(sink.extents))
        return sink


def _lower_priority() -> None:
    """Lowers the calling thread's priority, so that no step waits for a core that hashes an image.
    Only Linux has a priority for each thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PULL_NICENESS)


def _is_same(known: ImageHeader | None, header: ImageHeader) -> bool:
    """Returns whether a header is of the image that memory was granted for."""
    return known is not None and (known.image_id, known.total_bytes) == (
        header.image_id,
        header.total_bytes,
    )


def _mapped_pieces(job: PullJob, place: MappedPlace, start: int, end: int) -> Iterator[memoryview]:
    """Yields pieces of a mapped image, which count as bytes that come. Raises Cancelled."""
    for piece in place.pieces(start, end):
        if job.is_cancelled:
            raise Cancelled
        job.on_message()
        yield piece


def _write(progress: Progress, place: ImageSink, chunk: ImageChunk, position: int) -> int:
    assert progress.header is not None
    end = position + len(chunk.data)
    if chunk.offset != position or end > progress.header.total_bytes:
        raise CorruptImage(f"image bytes [{chunk.offset}, {end}) where {position} was due")
    place.write(position, chunk.data)
    return end


def _check_trailer(progress: Progress, trailer: PullMessage, position: int) -> None:
    assert progress.header is not None
    total = trailer_sha256(progress.part_hashes, progress.header.segments)
    if not isinstance(trailer, ImageTrailer) or trailer.sha256 != total:
        progress.restart()
        raise CorruptImage("the image fails its trailer's sha256")
    if not position == progress.offset == progress.header.total_bytes:
        progress.restart()
        raise CorruptImage(f"the image ends after {position} of its bytes")
