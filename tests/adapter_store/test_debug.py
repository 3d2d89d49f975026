"""The store's debug bundle shows neither its database's password nor its environment."""

from __future__ import annotations

import json

import pytest

from adapter_store.config import StoreSettings
from adapter_store.debug import secrets_of, shown_settings
from servicekit.telemetry.redact import Redactor

DSN = "postgresql+psycopg://loadout:pa%2Fss-word@db:5432/catalog?sslpassword=query-secret"


@pytest.fixture
def settings(monkeypatch) -> StoreSettings:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "environment-secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:proxy-secret@proxy:3128")
    monkeypatch.setenv("SOME_TOKEN_FILE", "/run/secrets/some-file")
    return StoreSettings(catalog_dsn=DSN, shared_s3="s3://bucket/prefix", max_rank=128)


def test_settings_are_shown_without_the_password(settings):
    shown = json.loads(json.dumps(shown_settings(settings)))
    assert shown["settings"]["catalog_dsn"] == "postgresql+psycopg://db/catalog"
    assert shown["settings"]["max_rank"] == 128
    assert {"catalog_dsn", "max_rank"} <= set(shown["set"])
    for secret in ("pa%2Fss-word", "pa/ss-word", "query-secret"):
        assert secret not in json.dumps(shown)


def test_secrets_are_found_however_they_are_written(settings):
    redactor = Redactor(secrets_of(settings))
    text = f"{DSN} pa/ss-word pa%2Fss-word query-secret environment-secret proxy-secret"
    left = redactor.redact(text)
    for secret in ("pa%2Fss-word", "pa/ss-word", "query-secret", "environment", "proxy-secret"):
        assert secret not in left
    assert redactor.redact("/run/secrets/some-file") == "/run/secrets/some-file"
