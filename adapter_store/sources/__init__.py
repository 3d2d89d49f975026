"""Where adapters come from. A source copies an adapter's files into a staging folder, limited.

local         file://: folders under allow-listed roots
s3            s3://: prefixes of allow-listed buckets
hub           hf://: repositories of the Hugging Face Hub, or of a server with its API
upload        files that the caller sends in chunks
staging       the folder where files arrive
staging_work  hashes and syncs of arriving files, in threads
limits        how much one adapter may take, and what ends its fetch early
choice        which of a folder's files to fetch, and which checkpoint
transfer      several files at once, with retries

A new kind of place (OCI, GCS) is one class with the one method of `Source`, wired to its scheme in
`app.py`, with its settings (allow-lists, endpoints) in `config.py`. Its `fetch`

1. reads the URI, and refuses sources that the operator has not allow-listed, before any request is
   sent;
2. pins one moment: resolves names that can move (an OCI tag, a hub branch) to fixed ones (a
   manifest's digest, a commit), or notes the versions' marks (GCS generations, S3 ETags);
3. lists names and sizes, lets `staging.choose_files` choose the needed ones (an OCI artifact's
   layers by their title annotation, a GCS prefix's objects) and `staging.check_sizes` refuse too
   much;
4. streams each into `staging.create(name, size)` in steps of READ_BYTES or less, several at once
   if that helps, each request for exactly the pinned moment; `Retry` waits between attempts and
   an interrupted stream continues where it broke;
5. fails with SOURCE_CHANGED rather than mix two moments, and returns the moment that it pinned.

Credentials come from the environment or the platform's chain and appear in no message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from adapter_store.sources.staging import Staging
from servicekit.errors import InvalidArgument

MAX_URI_LENGTH = 2048


class Source(Protocol):
    """One kind of place that adapters come from. Thread-safe; `fetch` blocks."""

    def fetch(self, uri: str, staging: Staging) -> str:
        """Copies the adapter's files at `uri` into `staging`, all of one moment.

        Returns the source's own name of that moment, recorded as `source_revision`: a commit of
        the hub, ETags of S3; "" where there is none.

        Raises InvalidArgument (not a place this store may read), NotFound, InvalidAdapter (files
        missing), LimitExceeded, FailedPrecondition (access denied), SourceUnavailable (no answer,
        or changed while it was read). Every message names the place.
        """
        ...


class Sources:
    """Sources by the scheme of their URIs."""

    def __init__(self, by_scheme: Mapping[str, Source]) -> None:
        self._by_scheme = dict(by_scheme)

    def find(self, uri: str) -> Source:
        """Returns the source that reads `uri`. Raises InvalidArgument if there is none."""
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

    def fetch(self, uri: str, staging: Staging) -> str:
        """Fetches by the source that reads `uri`. See Source.fetch."""
        return self.find(uri).fetch(uri, staging)
