"""Settings of the adapter store alone; see tests/servicekit/test_settings.py for what is shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from adapter_store.config import StoreSettings
from servicekit.settings.load import load_settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"catalog_dsn": "sqlite:///x"}, "postgresql"),
        ({"catalog_dsn": "postgresql+psycopg://u:s3cr3t@h/d"}, "--catalog-dsn needs --shared-s3"),
        ({"shared_s3": "bucket/prefix"}, "s3://BUCKET"),
        ({"shared_s3": "s3://b@d"}, "s3://BUCKET"),
    ],
)
def test_shared_storage_is_checked(values, message):
    with pytest.raises(ValidationError, match=message):
        StoreSettings(**values)


def test_the_catalog_password_is_hidden():
    dsn = "postgresql+psycopg://u:s3cr3t@h/d"
    settings = StoreSettings(catalog_dsn=dsn, shared_s3="s3://bucket/prefix")
    assert "s3cr3t" not in f"{settings!r} {settings.model_dump()}"
    assert settings.catalog_dsn.get_secret_value() == dsn
    assert StoreSettings(catalog_dsn="").catalog_dsn is None


def test_catalog_dsn_without_a_line_break():
    settings = StoreSettings(catalog_dsn="postgresql+psycopg://u:p@h/d\n", shared_s3="s3://bucket")
    assert settings.catalog_dsn.get_secret_value() == "postgresql+psycopg://u:p@h/d"
    assert StoreSettings(catalog_dsn="\n").catalog_dsn is None


def test_lists(monkeypatch):
    monkeypatch.setenv("LOADOUT_STORE_SOURCE_ROOTS", "/a, /b")
    settings = load_settings(
        StoreSettings, ["--s3-buckets", "one,two/three/", "--s3-buckets", "four"]
    )
    assert settings.source_roots == (Path("/a"), Path("/b"))
    assert settings.s3_buckets == ("one", "two/three", "four")


def test_a_bucket_may_have_its_own_endpoint():
    settings = StoreSettings(s3_buckets="one/two/@https://minio:9000/, three")
    assert settings.s3_buckets == ("one/two@https://minio:9000", "three")


@pytest.mark.parametrize(
    "arguments",
    [
        {"s3_buckets": "Upper"},
        {"s3_buckets": "bucket@ftp://host"},
        {"s3_buckets": "bucket@http://user:pass@host"},
        {"s3_buckets": "bucket@http://host/path"},
        {"s3_endpoint_url": "host:9000"},
        {"hf_organizations": "team/adapter"},
        {"hf_endpoint": "huggingface.co"},
        {"s3_endpoint_url": "http://user:pass@host"},
        {"image_memory": "0"},
        {"image_memory": "lots"},
        {"compile_workers": 0},
        {"event_retention": 0},
        {"shared_s3_endpoint_url": "host:9000"},
    ],
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValidationError):
        StoreSettings(**arguments)
