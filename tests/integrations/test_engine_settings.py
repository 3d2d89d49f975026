"""Settings of the integrations of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadout import errors, types
from loadout.integrations.adapter_folders import is_named_by
from loadout.integrations.engine_settings import DEFAULT_CACHE_BYTES, read_settings

NEEDED = {"LOADOUT_STORE": "store:7070", "LOADOUT_CACHE": "/cache"}


def test_the_environment_has_all_of_them(tmp_path: Path) -> None:
    few = read_settings(NEEDED)
    assert (few.store, few.cache, few.cache_bytes) == (
        "store:7070",
        Path("/cache"),
        DEFAULT_CACHE_BYTES,
    )
    assert (few.base_models, few.token, few.tls) == ((), "", None)
    (tmp_path / "token").write_text("secret\n")
    some = read_settings(
        NEEDED
        | {
            "LOADOUT_CACHE_BYTES": "1000",
            "LOADOUT_BASE_MODEL": "org/base, base",
            "LOADOUT_TOKEN_FILE": str(tmp_path / "token"),
            "LOADOUT_TLS_CA_FILE": "/ca.pem",
            "LOADOUT_ALLOW_INSECURE_TOKEN": "false",
        }
    )
    assert (some.cache_bytes, some.base_models) == (1000, ("org/base", "base"))
    assert some.token == "secret"
    assert some.tls is not None
    assert some.tls.ca_file == "/ca.pem"
    assert not some.allow_insecure_token


@pytest.mark.parametrize(
    ("given", "subject"),
    [
        ({"LOADOUT_STORE": ""}, "LOADOUT_STORE"),
        ({"LOADOUT_CACHE": " "}, "LOADOUT_CACHE"),
        ({"LOADOUT_CACHE_BYTES": "1 GB"}, "LOADOUT_CACHE_BYTES"),
        ({"LOADOUT_TOKEN_FILE": "/nothing"}, "/nothing"),
    ],
)
def test_invalid_ones_are_named(given: dict[str, str], subject: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        read_settings(NEEDED | given)
    assert refused.value.subject == subject


@pytest.mark.parametrize(
    ("ref", "may_mean"),
    [
        ("french", True),
        ("french@2", True),
        ("acme/french", True),
        ("acme/french@1", True),
        ("sha256:aa", True),
        ("zeta/french", False),
        ("fren", False),
        ("sha256:bb", False),
    ],
)
def test_an_event_may_be_of_any_tenants_name(ref: str, may_mean: bool) -> None:
    event = types.AdapterEvent(1, types.EventKind.UPDATED, "acme/french", 2, "sha256:aa", None)
    assert is_named_by(ref, event) is may_mean
