"""Pulls of messages that a test writes."""

from __future__ import annotations

import queue
from collections.abc import Generator

from contract.images.header import PullMessage
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.pulls.pace import PullPace
from inference_svc.adapters.pulls.pull import ImageSink, PullEvent, PullJob, PullOpened
from inference_svc.adapters.pulls.threads import Puller
from tests.support.inference.memory_store import LAYOUT_ID
from tests.support.wait import TIMEOUT_S


class Scripted:
    """A store that answers every pull with the same messages."""

    def __init__(self, messages: list[PullMessage]) -> None:
        self.messages = messages
        self.num_pulls = 0
        self.source, self.mapped = "script", None

    def pull(self, *_asked: object) -> Scripted:
        self.num_pulls += 1
        return self

    def __iter__(self) -> Generator[PullMessage]:
        yield from self.messages

    def cancel(self) -> None:
        pass


def outcome_of(store: Scripted, layout: ModelLayout, pace: PullPace | None = None) -> PullEvent:
    events: queue.SimpleQueue[PullEvent] = queue.SimpleQueue()
    puller = Puller(store, 1, events.put, layout.read_header, layout.check_rows, pace)
    job = PullJob("aaaa", LAYOUT_ID)
    puller.start(job)
    memory = memoryview(bytearray(1 << 16))
    while isinstance(event := events.get(timeout=TIMEOUT_S), PullOpened):
        slots = Slots(1 << 16, 1)
        reservation = slots.reserve(event.header)
        assert reservation is not None
        if job.grant(ImageSink(memory, reservation.resident.extents)):
            puller.start(job)
    puller.close()
    return event
