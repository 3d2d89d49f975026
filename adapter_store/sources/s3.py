"""s3:// sources: a prefix in an allow-listed bucket of S3 or a service that speaks its protocol.

All files are of one moment: they are listed, every GET requests exactly the listed ETag, however
many attempts it takes, and they are listed again in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from adapter_store.errors import LimitExceeded, SourceUnavailable
from adapter_store.sources.choice import find_checkpoints
from adapter_store.sources.staging import StagedFile, Staging
from adapter_store.sources.transfer import (
    CHANGED,
    STEP_BYTES,
    Retry,
    RetryPolicy,
    copy_all,
    in_blocks,
)
from servicekit.errors import FailedPrecondition, InvalidArgument, NotFound, ServiceError

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
MAX_LIST_PAGES = 20
MAX_CONNECTIONS = 64

_MISSING = frozenset({"404", "NoSuchKey", "NoSuchBucket", "NotFound"})
_DENIED = frozenset(
    {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
)
_CHANGED = frozenset({"412", "PreconditionFailed", "416", "InvalidRange"})


@dataclass(frozen=True, slots=True)
class S3Object:
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class S3Place:
    """`prefix` ends with a slash, or is empty for the bucket's root."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


class Listing(NamedTuple):
    """The objects directly under a prefix, and the names there that trainers give to
    checkpoints."""

    objects: dict[str, S3Object]
    checkpoints: list[str]


class S3Source:
    """Reads prefixes that `allowed` entries (BUCKET[/PREFIX][@ENDPOINT]) cover.

    The first entry that covers a place decides where it is read: at its own endpoint, else at
    `endpoint_url`, else at Amazon S3. Nothing that a caller sends, and no redirect, leads to
    another address. Credentials come from boto3's default chain. Clients are made on first use.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        endpoint_url: str = "",
        region: str = "",
        retry: RetryPolicy | None = None,
    ) -> None:
        entries = (entry.partition("@") for entry in allowed)
        self._allowed = tuple((path, at or endpoint_url) for path, _, at in entries)
        self._region = region
        self._retry = retry or RetryPolicy()
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}

    def fetch(self, uri: str, staging: Staging) -> str:
        """Fetches the files; the revision names their ETags. See Source.fetch. Raises
        SourceUnavailable for an object that changes meanwhile, and as `translate_errors`."""
        place = place_of(uri)
        client = self._connect(self._endpoint_of(place))
        objects, checkpoints = self._list(client, place, staging)
        names = staging.choose_files(objects, str(place), checkpoints)
        staging.check_sizes({name: objects[name].size_bytes for name in names})
        copy_all(
            names, lambda name: self._copy(client, place, name, objects[name], staging), staging
        )
        now, _ = self._list(client, place, staging)
        for name in names:
            if now.get(name) != objects[name]:
                raise _changed(f"{place}{name}")
        return " ".join(f"{name}={objects[name].etag.strip(chr(34))}" for name in names)

    def _endpoint_of(self, place: S3Place) -> str:
        path = f"{place.bucket}/{place.prefix}"
        for allowed, endpoint_url in self._allowed:
            if path.startswith(f"{allowed}/"):
                return endpoint_url
        raise InvalidArgument(
            f"source_uri: {place} is outside the buckets that this store may read (--s3-buckets)",
            subject="source_uri",
            reason="SOURCE_NOT_ALLOWED",
        )

    def _list(self, client: Any, place: S3Place, staging: Staging) -> Listing:
        """Returns the objects directly under the prefix. Raises NotFound if there is nothing."""
        retry = Retry(self._retry, staging)
        while True:
            try:
                with translate_errors(str(place)):
                    listing = _list_once(client, place)
                break
            except SourceUnavailable as error:
                retry.failed(error)
        if not any(listing):
            raise NotFound(
                f"source_uri: there is nothing at {place}",
                subject="source_uri",
                reason="SOURCE_NOT_FOUND",
            )
        return listing

    def _copy(
        self, client: Any, place: S3Place, name: str, expected: S3Object, staging: Staging
    ) -> None:
        """Reads one object of one ETag, continuing where a connection broke."""
        where = f"{place}{name}"
        get = partial(client.get_object, Bucket=place.bucket, Key=place.prefix + name)
        retry = Retry(self._retry, staging)
        with staging.create(name, expected.size_bytes) as file:
            while file.size_bytes < expected.size_bytes:
                before_bytes = file.size_bytes
                try:
                    with translate_errors(where):
                        _read_on(get, where, expected, file, staging)
                except SourceUnavailable as error:
                    if file.size_bytes > before_bytes:
                        retry.progressed()
                    retry.failed(error)

    def _connect(self, endpoint_url: str) -> Any:
        with self._lock:
            if endpoint_url not in self._clients:
                self._clients[endpoint_url] = self._make_client(endpoint_url)
            return self._clients[endpoint_url]

    def _make_client(self, endpoint_url: str) -> Any:
        # Takes half a second to import: only on first use.
        import boto3
        from botocore.config import Config

        # Only the endpoints of the settings: neither the environment's nor a profile's.
        no_others: dict[str, Any] = {"ignore_configured_endpoint_urls": True}
        session = boto3.session.Session(region_name=self._region or None)
        return session.client(
            "s3",
            endpoint_url=endpoint_url or None,
            region_name=session.region_name or "us-east-1",
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                max_pool_connections=MAX_CONNECTIONS,
                retries={"mode": "standard", "total_max_attempts": 1},  # ours: see Retry
                s3={"addressing_style": "path"},
                response_checksum_validation="when_required",
                **no_others,
            ),
        )


def _list_once(client: Any, place: S3Place) -> Listing:
    listing = Listing({}, [])
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=place.bucket, Prefix=place.prefix, Delimiter="/"
    )
    for number, page in enumerate(pages):
        if number == MAX_LIST_PAGES:
            raise LimitExceeded(f"{place}: too many objects", subject="source_uri")
        for entry in page.get("Contents", ()):
            name = entry["Key"].removeprefix(place.prefix)
            listing.objects[name] = S3Object(entry["Size"], entry["ETag"])
        folders = (entry["Prefix"] for entry in page.get("CommonPrefixes", ()))
        names = (folder.removeprefix(place.prefix).rstrip("/") for folder in folders)
        listing.checkpoints.extend(find_checkpoints(names))
    return listing


def _read_on(get: Any, where: str, expected: S3Object, file: StagedFile, staging: Staging) -> None:
    """Sends one GET for the missing bytes. Raises SourceUnavailable if not all of them arrive."""
    start, size = file.size_bytes, expected.size_bytes
    answer = get(IfMatch=expected.etag, **({"Range": f"bytes={start}-"} if start else {}))
    with answer["Body"] as body:
        # A service that ignores conditions or ranges must be noticed.
        if answer["ETag"] != expected.etag or answer["ContentLength"] != size - start:
            raise _changed(where)
        if start and not answer.get("ContentRange", "").startswith(f"bytes {start}-"):
            raise _unavailable(where, "the server did not resume the download where it broke off")
        for data in in_blocks(iter(partial(body.read, STEP_BYTES), b""), staging):
            file.write(data)
    if file.size_bytes != size:
        raise _unavailable(where, f"the connection ended after {file.size_bytes} of {size} bytes")


def place_of(uri: str) -> S3Place:
    """Parses s3://bucket/prefix, without decoding anything. Raises InvalidArgument."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/")
    # Some services and proxies normalise such keys, which would lead out of an allowed prefix.
    if not bucket or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise InvalidArgument(
            f"source_uri: {uri} is not of the form s3://bucket/prefix", subject="source_uri"
        )
    return S3Place(bucket, f"{prefix}/" if prefix else "")


@contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Turns the S3 client's errors into ours; `where` is the source that was being read. Messages
    contain only a code and the place. Raises FailedPrecondition, NotFound and SourceUnavailable."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as exc:
        raise _from_code(where, str(exc.response.get("Error", {}).get("Code", "?"))[:64]) from exc
    except NoCredentialsError as exc:
        raise _denied(where, "this store has no credentials") from exc
    except (BotoCoreError, HTTPError) as exc:
        raise _unavailable(where, type(exc).__name__) from exc


def _changed(where: str) -> SourceUnavailable:
    """Returns the error for an object that is no longer the listed one."""
    return SourceUnavailable(
        f"source_uri: {where} changed while it was read", subject="source_uri", reason=CHANGED
    )


def _unavailable(where: str, why: str) -> SourceUnavailable:
    """Returns the error for a failure that may pass."""
    return SourceUnavailable(f"source_uri: {where} cannot be read now: {why}", subject="source_uri")


def _from_code(where: str, code: str) -> ServiceError:
    if code in _MISSING:
        return NotFound(
            f"source_uri: {where} does not exist ({code})",
            subject="source_uri",
            reason="SOURCE_NOT_FOUND",
        )
    if code in _DENIED:
        return _denied(where, code)
    if code in _CHANGED:
        return _changed(where)
    return _unavailable(where, code)


def _denied(where: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"source_uri: this store may not read {where}: {why}",
        subject="source_uri",
        reason="SOURCE_ACCESS_DENIED",
    )
