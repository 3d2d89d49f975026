"""The adapter store's own errors, below the general kinds whose status code they have.

InvalidArgument
 └─ InvalidAdapter       the adapter's content is invalid; `subject` names the file, tensor or key
FailedPrecondition
 └─ IncompatibleAdapter  the adapter is valid, but a layout cannot serve it
Aborted
 ├─ Conflict             the name does not point to the digest that the caller requires
 └─ CallerGone           the caller left before the source was fetched
OutOfRange
 └─ RevisionTooOld       the requested history is gone; list again
ResourceExhausted
 └─ LimitExceeded        a size or count exceeds this store's limit
     ├─ DiskFull         this store's volume is full; it can add nothing
     └─ Overloaded       this store's memory is in use; a later retry may succeed
DeadlineExceeded
 └─ UploadStalled        the client uploads too slowly
Unavailable
 ├─ SourceUnavailable    the source did not answer
 └─ CatalogUnavailable   the catalog's database does not answer
     └─ BlobLost         stored files were collected before the catalog pointed to them
DataLoss
 └─ CorruptData          the store's own bytes fail their hash
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


class DiskFull(LimitExceeded):
    reason = "DISK_FULL"


def disk_full() -> DiskFull:
    return DiskFull(
        "the volume of this store's --data-dir is full: nothing can be added until its operator "
        "deletes adapters, lowers --disk-cache-bytes or makes the volume larger; stored adapters "
        "can be read, pulled and deleted"
    )


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
