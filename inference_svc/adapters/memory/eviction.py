"""Which images leave a memory for another one, in which order, and why."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator

from inference_svc.adapters.memory.resident import Resident


class EvictionReason(enum.Enum):
    """Why an image was evicted: for an image that a request waits for (AGED: for too long), for a
    prefetched one, or by an operator."""

    REQUEST = "request"
    AGED = "aged"
    PREFETCH = "prefetch"
    UNLOAD = "unload"


def can_evict(resident: Resident, keep: Collection[str]) -> bool:
    """Returns whether nothing uses, pins or writes the image, and it is none of `keep`."""
    if resident.pinned or resident.users or not resident.ready:
        return False
    return resident.digest not in keep


def eviction_order(
    residents: Collection[Resident], keep: Collection[str], waited_for: Collection[str]
) -> Iterator[Resident]:
    """Yields the images of `residents` that may be evicted, in their order (superseded ones, then
    the least recently used), but the ones that requests wait for after all others. Lazy: of
    thousands of images only the first ones are examined."""
    for is_waited_for in (False, True):
        for resident in residents:
            if (resident.digest in waited_for) == is_waited_for and can_evict(resident, keep):
                yield resident


def drain_order(residents: Iterable[Resident], keep: Collection[str]) -> list[Resident]:
    """Returns the images that may be drained, in use or not: the ones with few users first."""
    idle_first = sorted(residents, key=lambda resident: resident.users)
    return [r for r in idle_first if r.ready and not r.pinned and r.digest not in keep]
