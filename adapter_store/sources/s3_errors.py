"""What the S3 client raises, as the store's errors. No message carries more than code and place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adapter_store.errors import SourceUnavailable
from adapter_store.sources.retry import CHANGED
from servicekit.errors import FailedPrecondition, NotFound, ServiceError

_MISSING = frozenset({"404", "NoSuchKey", "NoSuchBucket", "NotFound"})
_DENIED = frozenset(
    {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
)
_CHANGED = frozenset({"412", "PreconditionFailed", "416", "InvalidRange"})


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turns the S3 client's errors into ours; `where` is what was being read."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as exc:
        raise _of_code(where, str(exc.response.get("Error", {}).get("Code", "?"))[:64]) from exc
    except NoCredentialsError as exc:
        raise _denied(where, "this store has no credentials") from exc
    except (BotoCoreError, HTTPError) as exc:
        raise unavailable(where, type(exc).__name__) from exc


def changed(where: str) -> SourceUnavailable:
    """For an object that is no longer the one that was listed."""
    return SourceUnavailable(
        f"source_uri: {where} changed while it was read", subject="source_uri", reason=CHANGED
    )


def unavailable(where: str, why: str) -> SourceUnavailable:
    """For trouble that may pass."""
    return SourceUnavailable(f"source_uri: {where} cannot be read now: {why}", subject="source_uri")


def _of_code(where: str, code: str) -> ServiceError:
    if code in _MISSING:
        return NotFound(
            f"source_uri: {where} does not exist ({code})",
            subject="source_uri",
            reason="SOURCE_NOT_FOUND",
        )
    if code in _DENIED:
        return _denied(where, code)
    if code in _CHANGED:
        return changed(where)
    return unavailable(where, code)


def _denied(where: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"source_uri: this store may not read {where}: {why}",
        subject="source_uri",
        reason="SOURCE_ACCESS_DENIED",
    )
