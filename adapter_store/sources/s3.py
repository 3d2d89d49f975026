"""s3:// sources: a prefix in an allow-listed bucket of S3 or a service that speaks its protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from adapter_store.errors import (
    InvalidArgument,
    LimitExceeded,
    NotFound,
    PreconditionFailed,
    SourceUnavailable,
    StoreError,
)
from adapter_store.sources.staging import READ_BYTES, StagedFile, Staging

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
MAX_ATTEMPTS = 5
MAX_LIST_PAGES = 20

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


class S3Source:
    """Reads prefixes that `allowed` entries (BUCKET or BUCKET/PREFIX) cover.

    Credentials come from boto3's default chain. The client is made on first use.
    """

    def __init__(self, allowed: Sequence[str], endpoint_url: str = "", region: str = "") -> None:
        self._allowed = tuple(allowed)
        self._endpoint_url = endpoint_url
        self._region = region
        self._lock = threading.Lock()
        self._client: Any = None

    def fetch(self, uri: str, staging: Staging) -> str:
        """As Source.fetch; the revision names the files' ETags."""
        place = place_of(uri)
        self._check_allowed(place)
        objects = self._list(place)
        names = staging.choose_files(objects, str(place))
        staging.expect({name: objects[name].size_bytes for name in names})
        for name in names:
            self._copy(place, name, objects[name], staging)
        now = self._list(place)
        for name in names:
            if now.get(name) != objects[name]:
                raise _changed(f"{place}{name}")
        return " ".join(f"{name}={objects[name].etag.strip(chr(34))}" for name in names)

    def _check_allowed(self, place: S3Place) -> None:
        path = f"{place.bucket}/{place.prefix}"
        if not any(path.startswith(f"{entry}/") for entry in self._allowed):
            raise InvalidArgument(
                f"source_uri: {place} does not lie in one of the buckets that this store may read "
                "(s3_buckets)",
                subject="source_uri",
                reason="SOURCE_NOT_ALLOWED",
            )

    def _list(self, place: S3Place) -> dict[str, S3Object]:
        """The objects directly under the prefix. Raises NotFound if there are none."""
        objects: dict[str, S3Object] = {}
        with _translated(str(place)):
            pages = (
                self._connect()
                .get_paginator("list_objects_v2")
                .paginate(Bucket=place.bucket, Prefix=place.prefix, Delimiter="/")
            )
            for number, page in enumerate(pages):
                if number == MAX_LIST_PAGES:
                    raise LimitExceeded(f"{place}: too many objects", subject="source_uri")
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(place.prefix)
                    objects[name] = S3Object(entry["Size"], entry["ETag"])
        if not objects:
            raise NotFound(
                f"source_uri: there is nothing at {place}",
                subject="source_uri",
                reason="SOURCE_NOT_FOUND",
            )
        return objects

    def _copy(self, place: S3Place, name: str, expected: S3Object, staging: Staging) -> None:
        """Reads one object, going on where the connection broke; always of the same ETag."""
        where = f"{place}{name}"
        with staging.create(name, expected.size_bytes) as file:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    with _translated(where):
                        self._read_on(place, name, expected, file)
                    break
                except SourceUnavailable as exc:
                    if attempt == MAX_ATTEMPTS or exc.reason == "SOURCE_CHANGED":
                        raise
            if file.size_bytes != expected.size_bytes:
                raise _changed(where)

    def _read_on(self, place: S3Place, name: str, expected: S3Object, file: StagedFile) -> None:
        if file.size_bytes == expected.size_bytes:
            return
        body = self._connect().get_object(
            Bucket=place.bucket,
            Key=place.prefix + name,
            IfMatch=expected.etag,
            **({"Range": f"bytes={file.size_bytes}-"} if file.size_bytes else {}),
        )["Body"]
        with body:
            while data := body.read(READ_BYTES):
                file.write(data)

    def _connect(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._make_client()
            return self._client

    def _make_client(self) -> Any:
        # Half a second to import: only stores that read S3 pay for it, and on first use.
        import boto3
        from botocore.config import Config

        session = boto3.session.Session(region_name=self._region or None)
        return session.client(
            "s3",
            endpoint_url=self._endpoint_url or None,
            region_name=session.region_name or "us-east-1",
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
                s3={"addressing_style": "path"},
            ),
        )


def place_of(uri: str) -> S3Place:
    """Reads s3://bucket/prefix; nothing in it is decoded. Raises InvalidArgument."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/")
    # Some services and proxies normalise such keys, which would lead out of an allowed prefix.
    if not bucket or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise InvalidArgument(
            f"source_uri: {uri} is not of the form s3://bucket/prefix", subject="source_uri"
        )
    return S3Place(bucket, f"{prefix}/" if prefix else "")


def _changed(where: str) -> SourceUnavailable:
    return SourceUnavailable(
        f"source_uri: {where} changed while it was read",
        subject="source_uri",
        reason="SOURCE_CHANGED",
    )


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Turns the S3 client's errors into ours; `where` is what was being read."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as exc:
        raise _of_code(where, str(exc.response.get("Error", {}).get("Code", "?"))) from exc
    except NoCredentialsError as exc:
        raise _denied(where, "this store has no credentials") from exc
    except (BotoCoreError, HTTPError) as exc:
        raise SourceUnavailable(
            f"source_uri: {where} cannot be read now: {type(exc).__name__}", subject="source_uri"
        ) from exc


def _of_code(where: str, code: str) -> StoreError:
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
    return SourceUnavailable(
        f"source_uri: {where} cannot be read now: {code}", subject="source_uri"
    )


def _denied(where: str, why: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"source_uri: this store may not read {where}: {why}",
        subject="source_uri",
        reason="SOURCE_ACCESS_DENIED",
    )
