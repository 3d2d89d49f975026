"""Where a service may listen without a policy, and what is wrong with certificates."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapter_store.config import StoreSettings
from inference_svc.config import InferenceSettings
from servicekit.errors import InvalidSetting
from servicekit.rpc.tls import CertificateFiles, check_exposure
from servicekit.settings.service import ServiceSettings
from tests.support.access.certificates import Authority

LOOPBACK = ["127.0.0.1:0", "127.9.9.9:70", "localhost:70", "[::1]:70"]
EXPOSED = ["0.0.0.0:70", "[::]:70", "10.1.2.3:70", "service.internal:70", "[fe80::1]:70"]


@pytest.fixture(params=["adapter_store", "inference_svc"])
def settings(request: Any, tmp_path: Path) -> Callable[..., ServiceSettings]:
    if request.param == "adapter_store":
        return StoreSettings
    (tmp_path / "config.json").write_text("{}")
    return lambda **given: InferenceSettings(model=tmp_path, **given)


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_needs_no_policy(settings: Any, address: str) -> None:
    check_exposure(settings(), listen=address, http=address)
    check_exposure(settings(), listen=address, http="")


@pytest.mark.parametrize("address", EXPOSED)
def test_other_addresses_need_a_policy_or_leave(
    settings: Any, address: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match="--policy-file, or --allow-open-access") as caught:
        check_exposure(settings(), listen=address)
    assert str(caught.value).startswith(f"--listen: {address} ")
    with pytest.raises(InvalidSetting, match=re.escape(f"--http: {address} ")):
        check_exposure(settings(), listen="127.0.0.1:0", http=address)
    check_exposure(settings(allow_open_access=True), listen=address)
    check_exposure(settings(policy_file=tmp_path / "policy.toml"), listen=address)


def test_what_is_wrong_with_certificates_is_named(settings: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (cert, key), (_, other) = authority.issue("server"), authority.issue("other")
    junk = tmp_path / "junk"
    junk.write_text("junk")
    cases: list[tuple[str, dict[str, Path]]] = [
        ("tls_key_file", {"tls_cert_file": cert}),
        ("tls_cert_file", {"tls_key_file": key}),
        ("tls_cert_file", {"tls_client_ca_file": authority.path}),
        ("tls_cert_file", {"tls_cert_file": junk, "tls_key_file": key}),
        ("tls_cert_file", {"tls_cert_file": cert, "tls_key_file": other}),
        (
            "tls_client_ca_file",
            {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": junk},
        ),
    ]
    for setting, files in cases:
        flag = f"--{setting.replace('_', '-')}"
        with pytest.raises(InvalidSetting, match=f"^{flag}: ") as caught:
            CertificateFiles(settings(**files))
        assert (caught.value.subject, caught.value.reason) == (setting, "SETTING_INVALID")
    assert CertificateFiles(settings()).current is None


def test_bad_files_at_reload_keep_the_certificates(settings: Any, tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("server")
    files = CertificateFiles(settings(tls_cert_file=cert, tls_key_file=key))
    before = files.current
    assert before is not None
    assert key.read_text() not in repr(before)
    cert.write_text("nonsense")
    with pytest.raises(InvalidSetting):
        files.reload()
    assert files.current is before
