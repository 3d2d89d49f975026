"""What a running store reads again when it is told to: policy, certificates, and its audit file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from adapter_store.core import StoreAuditEntry
from adapter_store.tls import CertificateFiles
from servicekit.auth.audit import Audit
from servicekit.auth.policy import PolicyFile
from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)


class Reload:
    """Call it on the event loop. What cannot be read is logged as an error, and stays as it was."""

    def __init__(
        self,
        policies: PolicyFile[Any],
        certificates: CertificateFiles,
        audit: Audit[StoreAuditEntry],
    ) -> None:
        self._policies = policies
        self._certificates = certificates
        self._audit = audit

    def __call__(self) -> None:
        self._attempt("audit_file", self._audit.reopen)
        self._attempt("policy_file", self._reload_policy)
        self._attempt("tls_cert_file", self._certificates.reload)

    def _reload_policy(self) -> None:
        with self._audit.record("ReloadPolicy"):
            self._policies.reload()

    def _attempt(self, setting: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (ServiceError, OSError) as error:
            logger.error("not reloaded", extra={"setting": setting, "why": str(error)})
        else:
            logger.info("reloaded", extra={"setting": setting})
