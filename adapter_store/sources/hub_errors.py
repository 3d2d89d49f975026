"""What `huggingface_hub` raises, as the store's errors. No message carries more than the place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adapter_store.errors import SourceUnavailable
from adapter_store.sources.retry import CHANGED
from servicekit.errors import FailedPrecondition, NotFound, ServiceError


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turns the hub client's errors into ours; `where` is what was being read."""
    from huggingface_hub import errors

    # The base class of what the HTTP library underneath raises, whichever that is.
    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except errors.GatedRepoError as exc:
        raise _denied(where, "it is gated, and access has not been granted to it") from exc
    except errors.DisabledRepoError as exc:
        raise _denied(where, "it is disabled") from exc
    except errors.RepositoryNotFoundError as exc:
        raise _missing(where, "or needs a token that this store does not have") from exc
    except errors.RevisionNotFoundError as exc:
        raise _missing(where, "at this revision") from exc
    except errors.EntryNotFoundError as exc:
        raise _missing(where, "at this commit") from exc
    except errors.HfHubHTTPError as exc:
        raise _of_status(where, exc) from exc
    except transport_error as exc:
        raise unavailable(where, type(exc).__name__) from exc


def changed(where: str, how: str) -> SourceUnavailable:
    """For content that is not that of the commit."""
    return SourceUnavailable(f"source_uri: {where} {how}", subject="source_uri", reason=CHANGED)


def unavailable(where: str, why: str) -> SourceUnavailable:
    """For trouble that may pass."""
    return SourceUnavailable(f"source_uri: {where} cannot be read now: {why}", subject="source_uri")


def _of_status(where: str, error: Any) -> ServiceError:
    status = error.response.status_code
    if status in (401, 403):
        return _denied(where, str(status))
    if status in (404, 410):
        return _missing(where, f"({status})")
    return unavailable(where, str(status))


def _missing(where: str, how: str) -> NotFound:
    return NotFound(
        f"source_uri: {where} does not exist {how}",
        subject="source_uri",
        reason="SOURCE_NOT_FOUND",
    )


def _denied(where: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"source_uri: this store may not read {where}: {why}",
        subject="source_uri",
        reason="SOURCE_ACCESS_DENIED",
    )
