"""Where adapters come from. A source copies an adapter's files into a staging folder, capped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from adapter_store.errors import InvalidArgument
from adapter_store.sources.staging import FetchLimits, Staging

__all__ = ["FetchLimits", "Source", "Sources", "Staging"]

MAX_URI_LENGTH = 2048


class Source(Protocol):
    """One kind of place. Thread-safe; `fetch` blocks."""

    def fetch(self, uri: str, staging: Staging) -> None:
        """Copies the adapter's files at `uri` into `staging`, all of one moment.

        Raises InvalidArgument (not a place this store may read), NotFound, InvalidAdapter (files
        missing), LimitExceeded, PreconditionFailed (access denied), SourceUnavailable (no answer,
        or changed while it was read). Every message names the place.
        """
        ...


class Sources:
    """Sources by the scheme of their URIs."""

    def __init__(self, by_scheme: Mapping[str, Source]) -> None:
        self._by_scheme = dict(by_scheme)

    def find(self, uri: str) -> Source:
        """Raises InvalidArgument for a URI that no source reads."""
        scheme, separator, _ = uri.partition("://")
        source = self._by_scheme.get(scheme) if separator else None
        if source is None:
            known = ", ".join(f"{name}://" for name in self._by_scheme)
            raise InvalidArgument(
                f"source_uri: {uri[:160]!r} does not start with one of {known}",
                subject="source_uri",
            )
        if len(uri) > MAX_URI_LENGTH or not uri.isprintable():
            raise InvalidArgument(
                f"source_uri: {uri[:160]!r} is longer than {MAX_URI_LENGTH} or not printable",
                subject="source_uri",
            )
        return source

    def fetch(self, uri: str, staging: Staging) -> None:
        self.find(uri).fetch(uri, staging)
