"""A residency without an engine, and one of two adapters that has no memory either."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.tiers import HostTier
from inference_svc.adapters.pulls.pull import PullEvent
from inference_svc.adapters.pulls.registration import Registrations
from inference_svc.adapters.pulls.threads import Puller
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
        registrations: Registrations | None = None,
    ) -> None:
        self.events: queue.SimpleQueue[PullEvent] = queue.SimpleQueue()
        self.puller = Puller(
            store,
            2,
            self.events.put,
            layout.read_header,
            layout.check_rows,
            registrations=registrations,
        )
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


@dataclass
class TwoAdapterRows:
    """An adapter view with room for two adapters; a load takes one step, eviction is first come.

    Counts waiters and users like residency does, and asserts that none goes below zero.
    """

    resident: list[str] = field(default_factory=list)
    users: dict[str, int] = field(default_factory=dict)
    waiters: dict[str, int] = field(default_factory=dict)
    ready: list[str] = field(default_factory=list)
    loading: set[str] = field(default_factory=set)
    drains: set[str] = field(default_factory=set)

    def add_waiter(self, digest: str, now_s: float, count: bool = True) -> None:
        self.waiters[digest] = self.waiters.get(digest, 0) + 1
        self.ensure_loading(digest, now_s)

    def ensure_loading(self, digest: str, now_s: float) -> None:
        if digest not in self.resident:
            self.loading.add(digest)

    def remove_waiter(self, digest: str, *, expired: bool = False) -> None:
        self.waiters[digest] -= 1
        assert self.waiters[digest] >= 0

    def is_schedulable(self, digest: str) -> bool:
        return digest in self.resident and digest not in self.drains

    def acquire(self, digest: str) -> int:
        assert digest in self.resident
        self.remove_waiter(digest)
        self.users[digest] = self.users.get(digest, 0) + 1
        return self.resident.index(digest)

    def release(self, digest: str) -> None:
        self.users[digest] -= 1
        assert self.users[digest] >= 0

    def pop_ready(self) -> list[str]:
        ready, self.ready = self.ready, []
        return ready

    def pop_changes(self) -> tuple[str, ...]:
        return ()

    def load_one(self, order: Iterable[str]) -> None:
        """Loads the first in order of service, if there is a row for it."""
        for digest in order:
            if digest in self.loading:
                return self._place(digest)
        return None

    def _place(self, digest: str) -> None:
        free = [row for row in range(2) if row >= len(self.resident)]
        idle = [row for row, held in enumerate(self.resident) if not self.users.get(held)]
        for row in (free + idle)[:1]:
            self.resident[row : row + 1] = [digest]
            self.loading.discard(digest)
            self.ready.append(digest)
