"""The adapter store as the inference service needs it: Protocols.

`store.client` implements it over gRPC; tests implement it in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Protocol

from contract.images.header import PullMessage


class PullStream(Protocol):
    """One pull in progress: an iterator over its messages. `source` names the replica of the store
    that sends them."""

    @property
    def source(self) -> str: ...

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
