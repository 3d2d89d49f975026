"""Room for what is on its way: where pulls write to, and in the arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from inference_svc.adapters.drains import Drains
from inference_svc.adapters.loads import Load, Loads, LoadState
from inference_svc.adapters.pull import ImageSink
from inference_svc.adapters.puller import Puller
from inference_svc.adapters.slots import EvictionReason
from inference_svc.adapters.tiers import Memories


@dataclass
class Rooms:
    """Gives room to `loads` and tells the `puller`, which writes to `pulled_into`. `waiters` counts
    the requests that wait for each digest; whoever owns it keeps it true."""

    memories: Memories
    loads: Loads
    waiters: Counter[str]
    puller: Puller
    pulled_into: memoryview
    drains: Drains = field(init=False)

    def __post_init__(self) -> None:
        self.drains = Drains(self.memories.device)

    def give(
        self, digest: str, load: Load, keep: Collection[str], now_s: float, why: EvictionReason
    ) -> bool:
        """Evicts for it as few as needed, none of `keep`; False, and nothing is evicted, if that
        makes no room. The load goes on with what it got."""
        if load.state is LoadState.NEEDS_DEVICE_ROOM:
            return self._give_device(digest, keep, now_s, why)
        assert load.header is not None
        assert load.job is not None
        resident = self.memories.pulled.reserve(load.header, keep, self.waiters, why)
        if resident is None:
            return False
        self.loads.got_pull_room(digest, now_s)
        load.job.last_progress_s = now_s
        if load.job.grant(ImageSink(self.pulled_into, resident.extents)):
            self.puller.start(load.job)
        return True

    def _give_device(
        self, digest: str, keep: Collection[str], now_s: float, why: EvictionReason
    ) -> bool:
        """Moves a host image into the arena; the copy rides in the next batch that has room."""
        memories = self.memories
        hosted = memories.in_host(digest)
        assert hosted is not None, "the load holds it"
        resident = memories.device.reserve(hosted.header, keep, self.waiters, why)
        if resident is None:
            return False
        load = self.loads.got_device_room(digest, now_s)
        memories.times.wait.observe(load.waited_s)
        memories.copy(hosted, resident, now_s, load)
        return True

    def drain(self, digest: str, load: Load, ahead: Collection[str]) -> None:
        """What is in use shall make room for this one, which has waited for long; nothing of
        `ahead`."""
        if self.memories.host is None or load.state is LoadState.NEEDS_DEVICE_ROOM:
            assert load.header is not None
            self.memories.news += self.drains.start(digest, load.header, ahead)

    def after_drains(self, now_s: float) -> None:
        """What drained for a digest is its room, whatever came before it meanwhile, or drains no
        more: else all would wait for each other."""
        if not self.drains:
            return
        drained = self.drains.drained(self.waiters)
        for digest, keep in drained:
            if self.loads.is_short(digest):
                self.give(digest, self.loads[digest], keep, now_s, EvictionReason.AGED)
        over = {digest for digest, _ in drained}
        self.memories.news += self.drains.end(lambda d: d in over or not self.loads.is_short(d))

    def end_drains(self) -> None:
        """For those that need no room any more."""
        self.memories.news += self.drains.end(lambda digest: not self.loads.is_short(digest))
