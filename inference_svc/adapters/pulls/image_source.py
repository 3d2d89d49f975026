"""The adapter store as the inference service needs it: Protocols.

`store.client` implements it over gRPC; tests implement it in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Protocol

from contract.images.header import PullMessage


class MappedImage(Protocol):
    """An image that the store shares, mapped as long as anybody holds it, and longer if somebody
    has a view of `data`: all of its bytes, which nobody can change. Thread-safe."""

    @property
    def data(self) -> memoryview: ...

    def copy(self, offset: int, memory: memoryview) -> None:
        """Copies the bytes from `offset` on to all of `memory`. Faster than from `data`, whose
        pages have to be mapped one by one. Raises CorruptImage if the image ends before."""

    def hold(self) -> None:
        """Adds a holder; the stream that has brought the image is one."""

    def release(self) -> None:
        """Ends what one holder holds."""


class PullStream(Protocol):
    """One pull in progress: an iterator over its messages. `source` names the replica of the store
    that sends them."""

    @property
    def source(self) -> str: ...

    @property
    def mapped(self) -> MappedImage | None:
        """The image, of which no chunks come, as soon as the header is here; None if its bytes are
        sent. The stream holds it until the trailer, or its end."""

    def __iter__(self) -> Generator[PullMessage]: ...

    def cancel(self) -> None:
        """Ends the stream at once, from any thread; a wait for its next message then raises
        StoreUnavailable. Idempotent."""
        ...


class AdapterStore(Protocol):
    def pull(
        self,
        digest: str,
        layout_id: str,
        offset: int = 0,
        image_id: str = "",
        avoid: Collection[str] = (),
    ) -> PullStream:
        """Streams an image from `offset` of `image_id`, and from none of the sources to `avoid` if
        there is a choice. Iterating blocks: use a pull thread.

        Iterating raises AdapterNotFound, AdapterUnusable, CorruptImage (never worth a retry) or
        StoreUnavailable (the stream is lost and may be resumed).
        """
        ...
