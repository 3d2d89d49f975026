from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from adapter_store.__main__ import main
from adapter_store.config import StoreSettings, load_settings
from servicekit.settings import split_address


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"catalog_dsn": "sqlite:///x"}, "postgresql"),
        ({"catalog_dsn": "postgresql+psycopg://u:s3cr3t@h/d"}, "shared_s3 is needed"),
        ({"shared_s3": "bucket/prefix"}, "s3://BUCKET"),
        ({"shared_s3": "s3://b@d"}, "s3://BUCKET"),
    ],
)
def test_what_replicas_share_is_checked(values, message):
    with pytest.raises(ValidationError, match=message):
        StoreSettings(**values)


def test_the_catalogs_password_is_not_shown():
    dsn = "postgresql+psycopg://u:s3cr3t@h/d"
    settings = StoreSettings(catalog_dsn=dsn, shared_s3="s3://bucket/prefix")
    assert "s3cr3t" not in f"{settings!r} {settings.model_dump()}"
    assert settings.catalog_dsn.get_secret_value() == dsn
    assert StoreSettings(catalog_dsn="").catalog_dsn is None


def test_the_end_of_an_editors_line_is_no_part_of_the_catalogs_name():
    settings = StoreSettings(catalog_dsn="postgresql+psycopg://u:p@h/d\n", shared_s3="s3://bucket")
    assert settings.catalog_dsn.get_secret_value() == "postgresql+psycopg://u:p@h/d"
    assert StoreSettings(catalog_dsn="\n").catalog_dsn is None


def test_every_setting_has_a_docstring():
    missing = [name for name, field in StoreSettings.model_fields.items() if not field.description]
    assert missing == []


def test_environment(monkeypatch):
    monkeypatch.setenv("LOADOUT_STORE_SOURCE_ROOTS", "/a, /b")
    monkeypatch.setenv("LOADOUT_STORE_MEMORY_BYTES", "3MiB")
    settings = load_settings()
    assert settings.source_roots == (Path("/a"), Path("/b"))
    assert settings.memory_bytes == 3 << 20


def test_the_command_line_wins(monkeypatch):
    monkeypatch.setenv("LOADOUT_STORE_LISTEN", "127.0.0.1:1")
    settings = load_settings(["--listen", "0.0.0.0:2", "--s3-buckets", "one,two/three/"])
    assert settings.listen == "0.0.0.0:2"
    assert settings.s3_buckets == ("one", "two/three")


def test_a_bucket_may_have_its_own_endpoint():
    settings = StoreSettings(s3_buckets="one/two/@https://minio:9000/, three")
    assert settings.s3_buckets == ("one/two@https://minio:9000", "three")


@pytest.mark.parametrize(
    "arguments",
    [
        {"listen": "7070"},
        {"listen": "host:70000"},
        {"s3_buckets": "Upper"},
        {"s3_buckets": "bucket@ftp://host"},
        {"s3_buckets": "bucket@http://user:pass@host"},
        {"s3_buckets": "bucket@http://host/path"},
        {"s3_endpoint_url": "host:9000"},
        {"hf_organizations": "team/adapter"},
        {"hf_endpoint": "huggingface.co"},
        {"s3_endpoint_url": "http://user:pass@host"},
        {"memory_bytes": "0"},
        {"memory_bytes": "lots"},
        {"compile_workers": 0},
        {"event_retention": 0},
        {"log_format": "xml"},
    ],
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValidationError):
        StoreSettings(**arguments)


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        StoreSettings().listen = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:70", ("127.0.0.1", 70)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:9", ("localhost", 9)),
    ],
)
def test_addresses(address, expected):
    assert split_address(StoreSettings(listen=address).listen) == expected


def test_bad_settings_end_in_one_plain_line(capsys):
    assert main(["--listen", "nowhere"]) == 2
    assert capsys.readouterr().err == "--listen: 'nowhere' is not HOST:PORT\n"


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in StoreSettings.model_fields)
