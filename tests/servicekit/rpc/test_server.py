"""The ready file, and what is read again on SIGHUP."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from adapter_store.config import StoreSettings
from servicekit.auth.audit import Audit, AuditEntry
from servicekit.auth.policy import PolicyFile
from servicekit.rpc.server import Reload, announce_ready, with_port, withdraw_ready
from servicekit.rpc.tls import CertificateFiles
from tests.servicekit.auth.services import each_service


def test_the_ready_file_has_the_addresses(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    withdraw_ready(path)
    announce_ready({"grpc": "127.0.0.1:1"}, path)
    assert json.loads(path.read_text()) == {"grpc": "127.0.0.1:1"}
    assert list(tmp_path.iterdir()) == [path]
    withdraw_ready(path)
    assert not path.exists()
    announce_ready({}, None)


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.1:0", "127.0.0.1:7"), ("[::1]:0", "[::1]:7")]
)
def test_a_chosen_port_is_shown(address: str, expected: str) -> None:
    assert with_port(address, 7) == expected


@each_service
def test_a_reload_takes_over_what_it_can_read(
    service: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, audit_path = tmp_path / "policy.toml", tmp_path / "audit.jsonl"
    path.write_text("")
    policies = PolicyFile(path, service.parse, service.unguarded)
    audit = Audit(audit_path, AuditEntry, frozenset(), logging.getLogger("audit"))
    reload = Reload(policies, CertificateFiles(StoreSettings()), audit)
    before = policies.policy
    path.write_text("tokens = 3")
    with caplog.at_level(logging.INFO):
        reload()
    assert policies.policy is before
    path.write_text("[tenants]")
    reload()
    assert policies.policy is not before
    audit.close()
    lines = [json.loads(line) for line in audit_path.read_text().splitlines()]
    assert [(line["what"], line["result"], line["reason"]) for line in lines] == [
        ("ReloadPolicy", "refused", "POLICY_INVALID"),
        ("ReloadPolicy", "ok", ""),
    ]
    failed = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [(each.getMessage(), each.setting) for each in failed] == [
        ("not reloaded", "policy_file")
    ]
