"""Credentials for the store: files are checked at start, and the token stays secret."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from inference_svc.config import InferenceSettings
from inference_svc.store import credentials
from inference_svc.store.credentials import StoreAccess, TokenFile, read_store_access
from servicekit.errors import InvalidSetting, PermissionDenied
from tests.support.access.certificates import Authority

TOKEN = "c2VjcmV0LW9mLXRoaXM"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def config(tmp_path: Path, **fields: Any) -> InferenceSettings:
    (tmp_path / "config.json").write_text("{}")
    return InferenceSettings(model=tmp_path, base_model="base", **fields)


def test_no_credentials_by_default(tmp_path: Path) -> None:
    assert read_store_access(config(tmp_path, store="[::1]:7070")) == StoreAccess()
    assert StoreAccess().metadata() == StoreAccess().forwarded_metadata(None) == ()


def test_token_is_sent_with_calls_and_not_shown(
    tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    access = read_store_access(config(tmp_path, store="localhost:7070", store_token_file=token))
    assert access.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    assert TOKEN not in repr(access) + caplog.text


@pytest.mark.parametrize("store", ["far:7070", "localhost:7070, 10.0.0.1:7070", "[fe80::1]:7070"])
def test_token_is_not_sent_unencrypted(tmp_path: Path, token: Path, store: str) -> None:
    fields = {"store": store, "store_token_file": token}
    with pytest.raises(
        InvalidSetting, match="--store-tls-ca-file, or --store-allow-insecure-token"
    ):
        read_store_access(config(tmp_path, **fields))
    assert read_store_access(config(tmp_path, store_allow_insecure_token=True, **fields)).token
    authority = Authority(tmp_path)
    access = read_store_access(config(tmp_path, store_tls_ca_file=authority.path, **fields))
    assert access.certificates is not None
    assert access.certificates.ca == authority.pem


@pytest.mark.parametrize("store", ["far:7070", "localhost:7070, 10.0.0.1:7070", "[fe80::1]:7070"])
def test_callers_token_is_not_sent_unencrypted(tmp_path: Path, store: str) -> None:
    access = read_store_access(config(tmp_path, store=store))
    assert access.forwarded_metadata(None) == ()
    with pytest.raises(PermissionDenied, match="has no TLS to its store") as caught:
        access.forwarded_metadata(TOKEN)
    assert TOKEN not in str(caught.value)
    passed = (("authorization", f"Bearer {TOKEN}"),)
    ca = Authority(tmp_path).path
    for fields in ({"store_tls_ca_file": ca}, {"store_allow_insecure_token": True}):
        assert (
            read_store_access(config(tmp_path, store=store, **fields)).forwarded_metadata(TOKEN)
            == passed
        )


@pytest.mark.parametrize("text", ["", " \n", "two words", "line\nline", "na\u00efve", "\x00"])
def test_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(InvalidSetting, match="must hold a token") as caught:
        TokenFile(path)
    assert text.strip() == "" or text not in str(caught.value)


def test_renewed_token_is_used_unless_invalid(
    tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = TokenFile(token)
    renewed = tmp_path / "renewed"
    renewed.write_text("bmV3")
    os.replace(renewed, token)
    assert file.current() == "bmV3"
    token.write_text("not a token")
    assert file.current() == "bmV3"
    token.unlink()
    assert file.current() == "bmV3"
    assert "bmV3" not in caplog.text
    token.write_text("bmV3ZXI")
    assert file.current() == "bmV3ZXI"


def test_a_token_that_could_not_be_read_is_tried_again(
    token: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As root reads every file, a denial is made: of a new one that is opened to us afterwards."""
    file = TokenFile(token)
    token.write_text("bmV3")
    with monkeypatch.context() as denied:
        denied.setattr(credentials, "_read_token", deny)
        previous = file.current()
        assert file.current() == previous != "bmV3"
    assert [each.levelname for each in caplog.records] == ["WARNING"], "once"
    assert file.current() == "bmV3"


def deny(path: Path) -> str:
    raise PermissionError(f"{path} may not be read")


def test_certificates_are_checked_at_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    chain, key = authority.issue("us")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    ca = authority.path
    cases = [
        ({"ca": nonsense}, "--store-tls-ca-file: .* has no PEM certificate"),
        ({"cert": chain, "key": key}, "--store-tls-ca-file: required by a client certificate"),
        ({"ca": ca, "cert": chain}, "--store-tls-key-file: required by a client certificate"),
        ({"ca": ca, "key": key}, "--store-tls-cert-file: required by a client certificate"),
        ({"ca": ca, "cert": nonsense, "key": key}, "--store-tls-cert-file: .* not a PEM chain"),
    ]
    for files, message in cases:
        fields = {f"store_tls_{name}_file": path for name, path in files.items()}
        with pytest.raises(InvalidSetting, match=message):
            read_store_access(config(tmp_path, **fields))
    access = read_store_access(
        config(tmp_path, store_tls_ca_file=ca, store_tls_cert_file=chain, store_tls_key_file=key)
    )
    assert access.certificates is not None
    assert access.certificates.key == key.read_bytes()
    assert "PRIVATE" not in repr(access)


@pytest.mark.parametrize("store", ["far", "a:1,b", "a:1,b:70000"])
def test_every_address_is_checked(tmp_path: Path, store: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        config(tmp_path, store=store)
    assert config(tmp_path, store="a:1, b:2,a:1,").store_addresses == ("a:1", "b:2")
