"""A residency without an engine."""

from __future__ import annotations

import contextlib
import queue
import time

import torch

from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.tiers import HostTier
from inference_svc.adapters.pulls.threads import Puller, PullEvent
from inference_svc.adapters.residency import build_residency
from inference_svc.backends.arena import Arena
from tests.support.wait import TIMEOUT_S

LAYOUT_ID = "sha256:layout"


class Loop:
    """Does the engine's part: hands events to a residency and applies its changes."""

    def __init__(
        self,
        store,
        layout: ModelLayout,
        arena_bytes: int,
        host_bytes: int,
        layout_id: str = LAYOUT_ID,
    ) -> None:
        self.events: queue.SimpleQueue[PullEvent] = queue.SimpleQueue()
        self.puller = Puller(store, 2, self.events.put, layout.read_header, layout.check_rows)
        host = HostTier(host_bytes) if host_bytes else None
        self.arena = Arena(layout, arena_bytes, 4, 64, torch.device("cpu"), host_bytes)
        self.residency = build_residency(
            Slots(arena_bytes, 4),
            host,
            self.arena.pull_memory,
            self.puller,
            max_rank=64,
            stall_s=10.0,
        )
        self.residency.loader.set_layout(layout_id)
        self.failures: list[tuple[str, Exception]] = []
        self.queue: list[str] = []

    def step(self, timeout_s: float = 0.02) -> None:
        with contextlib.suppress(queue.Empty):
            self.residency.loader.on_pull_event(
                self.events.get(timeout=timeout_s), time.monotonic()
            )
        self.residency.loader.advance(time.monotonic(), [(digest, True) for digest in self.queue])
        self.failures += self.residency.loader.pop_failures()
        self.arena.apply(self.residency.pop_changes())
        self.residency.loader.finish_copies(self.arena.pop_completed_copies(), time.monotonic())
        self.residency.check_integrity(self.residency.waiters)

    def until(self, condition) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            self.step()

    def load(self, digest: str) -> int:
        """Waits for the adapter and acquires it."""
        self.residency.add_waiter(digest, time.monotonic())
        self.until(lambda: self.residency.is_resident(digest))
        return self.residency.acquire(digest)


def assert_computes(loop: Loop, store, digest: str, slot: int) -> None:
    """The table's row shows exactly the image's weights."""
    image = store.images[digest]
    values = torch.frombuffer(bytearray(image.data), dtype=torch.float32)
    segments = {(s.target, s.kind): s for s in image.header.segments}
    for target, weights in loop.arena.table.weights(slot).items():
        for kind, view in ((SegmentKind.A, weights.a), (SegmentKind.B, weights.b)):
            segment = segments[target, kind]
            start = segment.offset // 4
            expected = values[start : start + view.numel()].view(view.shape)
            assert torch.equal(view, expected), (target, kind)
