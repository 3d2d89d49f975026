"""The S3 prefix that a store's replicas share.

Every method blocks, is thread-safe, and raises OSError when the service refuses or does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONNECT_SECONDS = 5
READ_SECONDS = 30
MAX_ATTEMPTS = 4
MAX_CONNECTIONS = 32
MAX_PUT_BYTES = 5 << 30
"""The most that S3 accepts in one request; only single requests can be conditional."""

DELETE_BATCH = 1000
_MISSING = frozenset({"404", "NoSuchKey", "NoSuchUpload", "NotFound"})
_EXISTS = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})


class ObjectStream:
    """The bytes of one object as they arrive."""

    def __init__(self, answer: Any) -> None:
        self._body = answer["Body"]
        self.size_bytes: int = answer["ContentLength"]

    def readinto(self, buffer: memoryview, /) -> int:
        """Reads some of the following bytes; 0 at the end."""
        with _translate_errors():
            data = self._body.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._body.close()


class Bucket:
    """`uri`: s3://bucket/prefix. Credentials come from boto3's default chain."""

    def __init__(self, uri: str, endpoint_url: str = "", region: str = "") -> None:
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self._bucket = bucket
        self._prefix = f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
        self._endpoint_url = endpoint_url
        self._region = region
        self._lock = threading.Lock()
        self._made: Any = None

    def put(self, key: str, path: Path) -> None:
        """Stores a file of any size under a key that has one writer."""
        with _translate_errors():
            self._client().upload_file(str(path), self._bucket, self._prefix + key)

    def put_if_absent(self, key: str, path: Path) -> bool:
        """Stores a file of at most MAX_PUT_BYTES. Returns False if there is an object of this
        key."""
        from botocore.exceptions import ClientError

        with _translate_errors(), open(path, "rb") as body:
            try:
                self._client().put_object(
                    Bucket=self._bucket, Key=self._prefix + key, Body=body, IfNoneMatch="*"
                )
            except ClientError as error:
                if _code(error) in _EXISTS:
                    return False
                raise
        return True

    def open(self, key: str) -> ObjectStream | None:
        """Opens an object for reading. Returns None if there is none."""
        from botocore.exceptions import ClientError

        with _translate_errors():
            try:
                answer = self._client().get_object(Bucket=self._bucket, Key=self._prefix + key)
            except ClientError as error:
                if _code(error) in _MISSING:
                    return None
                raise
        return ObjectStream(answer)

    def size(self, key: str) -> int | None:
        """Returns the size of an object in bytes, or None if there is none."""
        from botocore.exceptions import ClientError

        with _translate_errors():
            try:
                answer = self._client().head_object(Bucket=self._bucket, Key=self._prefix + key)
            except ClientError as error:
                if _code(error) in _MISSING:
                    return None
                raise
        return int(answer["ContentLength"])

    def keys(self, under: str) -> Iterator[list[str]]:
        """Yields the keys that start with `under`, in order, a thousand at a time."""
        with _translate_errors():
            pages = self._client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + under):
                found = page.get("Contents", ())
                yield [entry["Key"].removeprefix(self._prefix) for entry in found]

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, which may be absent. Raises OSError."""
        with _translate_errors():
            for start in range(0, len(keys), DELETE_BATCH):
                batch = [{"Key": self._prefix + key} for key in keys[start : start + DELETE_BATCH]]
                answer = self._client().delete_objects(
                    Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True}
                )
                if answer.get("Errors"):
                    raise OSError(f"the shared store: {answer['Errors'][0].get('Code')} at delete")

    def unfinished(self, under: str) -> Iterator[dict[str, list[str]]]:
        """Yields the multipart uploads in progress: ids by keys that start with `under`."""
        with _translate_errors():
            pages = self._client().get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + under):
                found: dict[str, list[str]] = {}
                for entry in page.get("Uploads", ()):
                    key = entry["Key"].removeprefix(self._prefix)
                    found.setdefault(key, []).append(entry["UploadId"])
                yield found

    def abort(self, key: str, upload_ids: Sequence[str]) -> None:
        """Aborts multipart uploads, which may have ended."""
        from botocore.exceptions import ClientError

        with _translate_errors():
            for upload_id in upload_ids:
                try:
                    self._client().abort_multipart_upload(
                        Bucket=self._bucket, Key=self._prefix + key, UploadId=upload_id
                    )
                except ClientError as error:
                    if _code(error) not in _MISSING:
                        raise

    def delete_under(self, prefix: str) -> None:
        for keys in self.keys(prefix):
            self.delete(keys)

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make_client()
            return self._made

    def _make_client(self) -> Any:
        # Half a second to import: only stores that share pay for it.
        import boto3
        from botocore.config import Config

        session = boto3.session.Session(region_name=self._region or None)
        return session.client(
            "s3",
            endpoint_url=self._endpoint_url or None,
            region_name=session.region_name or "us-east-1",
            config=Config(
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                max_pool_connections=MAX_CONNECTIONS,
                retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "?"))[:64]


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turns the client's errors into OSError. Messages contain only a code: the client's own hold
    addresses and requests."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as exc:
        raise OSError(f"the shared store answers {_code(exc)}") from exc
    except (Boto3Error, BotoCoreError, HTTPError) as exc:
        raise OSError(f"the shared store does not answer: {type(exc).__name__}") from exc
