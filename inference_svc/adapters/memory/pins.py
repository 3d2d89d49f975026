"""Which images of one memory are pinned, for whom, and which room the pins leave for others."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from itertools import chain

from contract.images.header import ImageHeader
from inference_svc.adapters.memory.resident import Resident, Shape
from inference_svc.adapters.memory.stages import StageMemories, shape_of
from inference_svc.errors import NoRoom
from servicekit.errors import ShareExceeded
from servicekit.shares import limit_of


class Pins:
    """Pins of images in a memory of `capacity` bytes in each stage, at most `max_images` of them.

    Pins always leave room for an image whose parts have the shapes `largest`, so that they can
    never stop others from loading. Images with whole weights may be larger: admitted ones are
    checked again whenever `num_pinnings` has grown. An account pins at most `share` of the rows,
    and of the bytes, that others' pins leave.
    """

    def __init__(
        self,
        capacity: int,
        max_images: int,
        largest: Sequence[Shape],
        share: float,
        num_stages: int = 1,
    ) -> None:
        self._stage_bytes, self._num_stages = capacity, num_stages
        self.capacity = capacity * num_stages
        self.max_images = max_images
        self.largest = largest
        self._share = share
        self._pinned: dict[str, Resident] = {}
        self.num_pinnings = 0

    @property
    def largest_bytes(self) -> int:
        return sum(part.num_bytes for part in self.largest)

    @property
    def digests(self) -> Set[str]:
        return self._pinned.keys()

    @property
    def num_bytes(self) -> int:
        return sum(resident.num_bytes for resident in self._pinned.values())

    def admits(self, header: ImageHeader) -> bool:
        """Returns whether the image fits once nothing runs: next to the pinned ones."""
        return self._with_pinned().allocate(shape_of(header)) is not None

    def admits_together(self, count: int, headers: Collection[ImageHeader]) -> bool:
        """Returns whether so many images, of which these are known, fit at once, once nothing else
        runs: next to the pinned ones."""
        digests = {header.digest for header in headers}
        others = [r for digest, r in self._pinned.items() if digest not in digests]
        if count + len(others) > self.max_images:
            return False
        extents = chain.from_iterable(resident.extents for resident in others)
        left = StageMemories.with_used(self._stage_bytes, self._num_stages, extents)
        return all(left.allocate(shape_of(header)) is not None for header in headers)

    def _with_pinned(self, *more: Resident) -> StageMemories:
        """Returns the memory with only the pinned images in it, and these."""
        pinned = (resident.extents for resident in (*self._pinned.values(), *more))
        extents = chain.from_iterable(pinned)
        return StageMemories.with_used(self._stage_bytes, self._num_stages, extents)

    def pin(self, resident: Resident, account: str = "") -> None:
        """Protects an image from eviction, for an account; "" has no share. Accounts whose adapters
        have equal content pin one image: it counts against the share of each. Raises NoRoom if pins
        could stop others from loading, and ShareExceeded if the account has pinned its share."""
        if account in resident.pinned_by:
            return
        if account:
            self._check_share(resident, account)
        if not resident.pinned:
            self._check_room(resident)
            self._pinned[resident.digest] = resident
            self.num_pinnings += 1
        resident.pinned_by.add(account)

    def unpin(self, resident: Resident, account: str = "") -> None:
        """Takes back the account's pin; "", operators of all accounts, takes back all pins. The
        image may be evicted once no account pins it."""
        if account:
            resident.pinned_by.discard(account)
        else:
            resident.pinned_by.clear()
        if not resident.pinned:
            self.forget(resident.digest)

    def forget(self, digest: str) -> None:
        """Notes that an image has left the memory."""
        self._pinned.pop(digest, None)

    def _check_room(self, resident: Resident) -> None:
        if len(self._pinned) + 1 >= self.max_images:
            raise NoRoom(
                f"pinning would take the last of {self.max_images} rows; raise --max-loras or "
                "unpin another adapter",
                subject="max_loras",
            )
        left = self._with_pinned(resident)
        if self.largest and left.allocate(self.largest) is None:
            raise NoRoom(
                f"pinning {resident.num_bytes} bytes would leave no room for the largest "
                f"admissible adapter ({self.largest_bytes} bytes) in {self.capacity} bytes; "
                "raise --adapter-memory or unpin another adapter",
                subject="adapter_memory",
            )

    def _check_share(self, resident: Resident, account: str) -> None:
        own = [each for each in self._pinned.values() if account in each.pinned_by]
        others = len(self._pinned) - len(own)
        room = self.capacity - self.largest_bytes
        own_bytes = sum(each.num_bytes for each in own)
        most = limit_of(self.max_images - 1, others, self._share)
        most_bytes = limit_of(room, self.num_bytes - own_bytes, self._share)
        if own and (len(own) + 1 > most or own_bytes + resident.num_bytes > most_bytes):
            raise ShareExceeded(
                f"pinned_adapters: {account} has pinned {len(own)} adapters of {own_bytes} "
                f"bytes; one tenant's share is {self._share:.0%} of the part that others "
                f"leave free, now {most} adapters and {most_bytes} bytes: unpin another adapter",
                subject="pinned_adapters",
            )
