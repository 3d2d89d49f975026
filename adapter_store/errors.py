"""What can go wrong in the adapter store, without a word about transport.

StoreError
 ├─ InvalidArgument      the caller's argument, named by `field`
 ├─ InvalidAdapter       the adapter's own content, named by `subject` (file, tensor or key)
 ├─ IncompatibleAdapter  valid, but not servable under a layout
 ├─ Unauthenticated      no token, or one that this store does not know
 ├─ PermissionDenied     the token's role may not do this
 ├─ NotFound             no such adapter, version, digest or layout
 ├─ Conflict             the name points elsewhere than the caller required
 ├─ PreconditionFailed   content differs from what was expected; no common image format
 ├─ LimitExceeded        a size or count limit of this store
 │   ├─ QuotaExceeded    a limit of the tenant; `subject` names the quota
 │   └─ Overloaded       this store's memory is in use; asking again later may succeed
 ├─ PullStalled          a reader that took nothing for too long
 ├─ UploadStalled        a writer that sent nothing for too long
 ├─ RevisionTooOld       the history asked for is gone: list again
 ├─ SourceUnavailable    the source did not answer
 ├─ CatalogUnavailable   the catalog's database does not answer
 │   └─ BlobLost         what was stored was collected before the catalog pointed to it
 ├─ Draining             this store is shutting down: ask again elsewhere, or later
 └─ CorruptData          bytes of our own that fail their hash
"""

from __future__ import annotations


class StoreError(Exception):
    """An error to be reported to the caller.

    `subject` names the culprit (a field, file, tensor or config key); `reason` is a stable
    UPPER_SNAKE word for programs.
    """

    reason = "STORE_ERROR"

    def __init__(self, message: str, *, subject: str = "", reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject
        if reason is not None:
            self.reason = reason


class InvalidArgument(StoreError):
    reason = "INVALID_ARGUMENT"


class InvalidAdapter(StoreError):
    reason = "INVALID_ADAPTER"


class IncompatibleAdapter(StoreError):
    reason = "INCOMPATIBLE_ADAPTER"


class Unauthenticated(StoreError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(StoreError):
    reason = "PERMISSION_DENIED"


class NotFound(StoreError):
    reason = "NOT_FOUND"


class Conflict(StoreError):
    reason = "CONFLICT"


class PreconditionFailed(StoreError):
    reason = "PRECONDITION_FAILED"


class LimitExceeded(StoreError):
    reason = "LIMIT_EXCEEDED"


class QuotaExceeded(LimitExceeded):
    """`retry_after_seconds` > 0: asking again then may succeed."""

    reason = "QUOTA_EXCEEDED"

    def __init__(self, message: str, *, subject: str = "", retry_after_seconds: float = 0) -> None:
        super().__init__(message, subject=subject)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(LimitExceeded):
    """`retry_after_seconds`: when asking again may succeed."""

    reason = "OVERLOADED"

    def __init__(self, message: str, *, subject: str = "", retry_after_seconds: float = 0) -> None:
        super().__init__(message, subject=subject)
        self.retry_after_seconds = retry_after_seconds


class PullStalled(StoreError):
    reason = "PULL_STALLED"


class UploadStalled(StoreError):
    reason = "UPLOAD_STALLED"


class RevisionTooOld(StoreError):
    reason = "REVISION_TOO_OLD"


class SourceUnavailable(StoreError):
    reason = "SOURCE_UNAVAILABLE"


class CatalogUnavailable(StoreError):
    reason = "CATALOG_UNAVAILABLE"


class BlobLost(CatalogUnavailable):
    reason = "BLOB_LOST"


class Draining(StoreError):
    reason = "DRAINING"


class CorruptData(StoreError):
    reason = "CORRUPT_DATA"
