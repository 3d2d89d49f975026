"""This replica's leases, renewed by one thread as long as the process lives."""

from __future__ import annotations

import logging
import threading
import uuid

from adapter_store.catalog.leases import WorkLeases
from adapter_store.errors import CatalogUnavailable

logger = logging.getLogger(__name__)


class Leases:
    """Thread-safe. The leases of a replica that is killed expire after `lease_seconds`."""

    def __init__(self, rows: WorkLeases, lease_seconds: float) -> None:
        self._rows = rows
        self._lease_seconds = lease_seconds
        self._owner = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, name="leases", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> str:
        """The id of this replica, until the process ends."""
        return self._owner

    def acquire(self, key: str) -> bool:
        """Returns False if another replica has the lease. Raises CatalogUnavailable."""
        if not self._rows.acquire(key, self._owner, self._lease_seconds):
            return False
        with self._lock:
            self._held.add(key)
        return True

    def is_held(self, key: str) -> bool:
        """Returns whether any replica has the lease. Raises CatalogUnavailable."""
        return self._rows.is_held(key)

    def forget(self, key: str) -> None:
        """Stops renewing a lease that is released by other means, or left to expire."""
        with self._lock:
            self._held.discard(key)

    def release(self, key: str) -> None:
        """Releases a lease; if the catalog does not answer, it expires."""
        self.forget(key)
        try:
            self._rows.release(key, self._owner)
        except CatalogUnavailable as error:
            logger.warning("a lease was not released; it expires", extra={"why": str(error)})

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _renew_for_ever(self) -> None:
        while not self._stopping.wait(self._lease_seconds / 3):
            # By key: a lease that could not be released must expire, although this replica lives.
            with self._lock:
                held = sorted(self._held)
            if not held:
                continue
            try:
                self._rows.renew(held, self._owner, self._lease_seconds)
            except CatalogUnavailable as error:
                logger.warning("leases were not renewed", extra={"why": str(error)})
            except Exception:
                logger.exception("renewing leases failed; trying again")
