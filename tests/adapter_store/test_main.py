from __future__ import annotations

from adapter_store.__main__ import NOISY_LOGGERS


def test_clients_that_log_requests_are_noisy():
    for name in ("botocore.auth", "urllib3.connectionpool", "httpx2", "httpcore2.http11"):
        assert name.split(".")[0] in NOISY_LOGGERS
