"""What a running server reads again when it is told to: policy, certificates, its audit file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from inference_svc.tls import CertificateFiles
from servicekit.auth.audit import Audit
from servicekit.auth.policy import PolicyFile
from servicekit.errors import InvalidSetting

log = logging.getLogger(__name__)


class Reload:
    """Call it on the event loop. What cannot be read is logged as an error, and stays as it was."""

    def __init__(
        self, policies: PolicyFile[Any], certificates: CertificateFiles, audit: Audit[Any]
    ) -> None:
        self._policies = policies
        self._certificates = certificates
        self._audit = audit

    def __call__(self) -> None:
        _attempt("audit_file", self._audit.reopen)
        _attempt("policy_file", self._reload_policy)
        _attempt("tls_cert_file", self._certificates.reload)

    def _reload_policy(self) -> None:
        with self._audit.record("ReloadPolicy"):
            self._policies.reload()


def _attempt(setting: str, action: Callable[[], None]) -> None:
    try:
        action()
    except (InvalidSetting, OSError) as error:
        log.error("%s is not reloaded: %s", setting, error)
    else:
        log.info("%s is reloaded", setting)
