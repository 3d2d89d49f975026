"""TLS and mTLS of the inference service with real certificates, and their renewal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from loadout import Client, TlsConfig, errors
from loadout.retry import RetryPolicy
from servicekit.errors import InvalidSetting
from tests.support.access.certificates import Authority
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.system.guarded import Inference

BASE = "llama"


def ask(inference: Inference, tls: TlsConfig | None, token: str | None = None) -> str:
    """What a fresh client learns."""
    client = Client(
        inference.server.address, token=token, tls=tls, retry=RetryPolicy(max_attempts=1)
    )
    with client:
        return client.server_info(timeout_s=60).base_model


def test_tls_with_a_token(serve_base: Any, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("service")
    policy = write_policy(tmp_path, token_lines("gateway", ["caller"]))
    inference = serve_base(tls_cert_file=cert, tls_key_file=key, policy_file=policy)
    trusted = TlsConfig(authority.path)
    assert ask(inference, trusted, token_of("gateway")) == BASE
    with pytest.raises(errors.Unauthenticated):
        ask(inference, trusted)
    for other in (TlsConfig(Authority(tmp_path, "other").path), None):
        with pytest.raises(errors.StreamLost):
            ask(inference, other, token_of("gateway"))


def test_mutual_tls(serve_base: Any, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("service")
    clients = Authority(tmp_path, "clients")
    inference = serve_base(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=clients.path)
    assert ask(inference, TlsConfig(authority.path, *clients.issue("good"))) == BASE
    forged = Authority(tmp_path, "forged").issue("bad")
    for pair in (forged, (None, None)):
        with pytest.raises(errors.StreamLost):
            ask(inference, TlsConfig(authority.path, *pair))


def test_renewed_certificates_need_no_restart(
    serve_base: Any, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.issue("service")
    inference = serve_base(tls_cert_file=cert, tls_key_file=key)
    old = TlsConfig(authority.path)
    with Client(inference.server.address, tls=old) as kept:
        assert kept.server_info().base_model == BASE
        cert.write_text("nonsense")
        inference.reload()
        assert [each.setting for each in caplog.records if each.message == "not reloaded"] == [
            "tls_cert_file"
        ]
        assert ask(inference, old) == BASE
        renewed = Authority(tmp_path, "new")
        for source, target in zip(renewed.issue("renewed"), (cert, key), strict=True):
            shutil.copy(source, target)
        inference.reload()
        assert ask(inference, TlsConfig(renewed.path)) == BASE
        with pytest.raises(errors.StreamLost):
            ask(inference, old)
        assert kept.server_info().base_model == BASE  # connections go on


def test_a_bad_start_is_said(serve_base: Any, authority: Authority) -> None:
    cert, _ = authority.issue("service")
    with pytest.raises(InvalidSetting, match="--tls-key-file: "):
        serve_base(tls_cert_file=cert)
