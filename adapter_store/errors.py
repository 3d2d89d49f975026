"""The adapter store's own errors, below the general kinds whose status code they have.

InvalidArgument
 └─ InvalidAdapter       the adapter's own content, named by `subject` (file, tensor or key)
FailedPrecondition
 └─ IncompatibleAdapter  valid, but not servable under a layout
Aborted
 ├─ Conflict             the name points elsewhere than the caller required
 └─ CallerGone           the caller left before its source was fetched
OutOfRange
 └─ RevisionTooOld       the requested history is gone: list again
ResourceExhausted
 └─ LimitExceeded        a size or count limit of this store
     └─ Overloaded       this store's memory is in use; trying again later may succeed
DeadlineExceeded
 └─ UploadStalled        a writer that sent too little for too long
Unavailable
 ├─ SourceUnavailable    the source did not answer
 └─ CatalogUnavailable   the catalog's database does not answer
     └─ BlobLost         what was stored was collected before the catalog pointed to it
DataLoss
 └─ CorruptData          bytes of our own that fail their hash
"""

from __future__ import annotations

from servicekit.errors import (
    Aborted,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)


class InvalidAdapter(InvalidArgument):
    reason = "INVALID_ADAPTER"


class IncompatibleAdapter(FailedPrecondition):
    reason = "INCOMPATIBLE_ADAPTER"


class Conflict(Aborted):
    reason = "CONFLICT"


class CallerGone(Aborted):
    reason = "CALLER_GONE"


class RevisionTooOld(OutOfRange):
    reason = "REVISION_TOO_OLD"


class LimitExceeded(ResourceExhausted):
    reason = "LIMIT_EXCEEDED"


def disk_full() -> LimitExceeded:
    return LimitExceeded("this store's disk is full", reason="DISK_FULL")


class Overloaded(LimitExceeded):
    reason = "OVERLOADED"


class UploadStalled(DeadlineExceeded):
    reason = "UPLOAD_STALLED"


class SourceUnavailable(Unavailable):
    reason = "SOURCE_UNAVAILABLE"


class CatalogUnavailable(Unavailable):
    reason = "CATALOG_UNAVAILABLE"


class BlobLost(CatalogUnavailable):
    reason = "BLOB_LOST"


class CorruptData(DataLoss):
    reason = "CORRUPT_DATA"
