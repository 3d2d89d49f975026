"""Where a server may listen without a policy, and what is wrong with certificates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inference_svc.config import InferenceSettings
from inference_svc.tls import CertificateFiles, check_exposure, read_certificates
from servicekit.errors import InvalidSetting
from tests.adapter_store.certificates import Authority

LOOPBACK = ["127.0.0.1:0", "127.9.9.9:70", "localhost:70", "[::1]:70"]
EXPOSED = ["0.0.0.0:70", "[::]:70", "10.1.2.3:70", "inference.internal:70", "[fe80::1]:70"]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text("{}")
    return lambda **settings: InferenceSettings(model=tmp_path, **settings)


@pytest.mark.parametrize("listen", LOOPBACK)
def test_loopback_needs_no_policy(config: Any, listen: str) -> None:
    check_exposure(config(listen=listen, http=listen))


@pytest.mark.parametrize("listen", EXPOSED)
def test_other_addresses_need_a_policy_or_a_word(config: Any, listen: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="policy_file, or allow_open_access") as caught:
        check_exposure(config(listen=listen))
    assert str(caught.value).startswith(f"listen: {listen} ")
    with pytest.raises(InvalidSetting, match=re.escape(f"http: {listen} ")):
        check_exposure(config(http=listen))
    check_exposure(config(listen=listen, allow_open_access=True))
    check_exposure(config(listen=listen, policy_file=tmp_path / "policy.toml"))


def test_what_is_wrong_with_certificates_is_named(config: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (cert, key), (_, other) = authority.issue("server"), authority.issue("other")
    junk = tmp_path / "junk"
    junk.write_text("junk")
    cases: list[tuple[str, dict[str, Path]]] = [
        ("tls_key_file: ", {"tls_cert_file": cert}),
        ("tls_cert_file: ", {"tls_key_file": key}),
        ("tls_cert_file: ", {"tls_client_ca_file": authority.path}),
        ("tls_cert_file: ", {"tls_cert_file": junk, "tls_key_file": key}),
        ("tls_cert_file: ", {"tls_cert_file": cert, "tls_key_file": other}),
        (
            "tls_client_ca_file: ",
            {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": junk},
        ),
    ]
    for start, settings in cases:
        with pytest.raises(InvalidSetting) as caught:
            read_certificates(config(**settings))
        assert str(caught.value).startswith(start), settings
    assert read_certificates(config()) is None


def test_files_that_became_bad_leave_the_certificates_as_they_were(
    config: Any, tmp_path: Path
) -> None:
    cert, key = Authority(tmp_path).issue("server")
    files = CertificateFiles(config(tls_cert_file=cert, tls_key_file=key))
    before = files.current
    assert before is not None
    assert key.read_text() not in repr(before)
    cert.write_text("nonsense")
    with pytest.raises(InvalidSetting):
        files.reload()
    assert files.current is before
