"""Opens the stored sources of adapters, which were valid when they were stored."""

from __future__ import annotations

import logging
from collections.abc import Callable

from adapter_store.blobs.local import Blobs
from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.recently_verified import VerifiedCheckpoints
from adapter_store.errors import CorruptData, InvalidAdapter
from adapter_store.metrics.registry import Metrics

logger = logging.getLogger(__name__)

# Registered adapters stay servable when the limits for new ones become tighter, or a key that was
# allowed is so no more.
_NO_LIMITS = CheckpointLimits(
    max_config_bytes=1 << 30,
    max_header_bytes=1 << 30,
    max_tensors=1 << 30,
    max_source_bytes=1 << 62,
    max_rank=1 << 30,
    max_match_seconds=1e9,
    allowed_config_keys=None,
)


class StoredSources:
    """The sources by digest. Blocking and thread-safe."""

    def __init__(self, blobs: Blobs, verified: VerifiedCheckpoints, metrics: Metrics) -> None:
        self._blobs = blobs
        self._verified = verified
        self._metrics = metrics

    def open(self, digest: str, check_recorded: Callable[[], object]) -> Checkpoint:
        """Opens a source; its bytes are not read unless they were just verified. `check_recorded`
        raises if the digest has no record any more. Raises CorruptData, and as
        `check_recorded`."""
        folder = self._blobs.path(digest)
        checkpoint = self._verified.find(digest, folder)
        if checkpoint is not None:
            return checkpoint
        try:
            return open_checkpoint(folder, _NO_LIMITS, digest=digest)
        except InvalidAdapter as error:  # it was valid when it was stored
            check_recorded()  # it may have been collected meanwhile
            raise self.damaged(digest, str(error)) from error

    def damaged(self, digest: str, why: str) -> CorruptData:
        """Logs and counts a damaged source; returns the error for callers."""
        logger.error("damaged blob", extra={"digest": digest, "why": why})
        self._metrics.damaged_files.labels("blob").inc()
        return CorruptData(
            f"the stored source of {digest} is damaged; register the adapter again", subject=digest
        )
