"""The adapter's key, and the load in an answer's metadata."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadout._routing.metadata import LOAD_HEADER, Load, adapter_key, check_tenant, read_load
from loadout.errors import InvalidArgument

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("ref", "key"),
    [
        ("french", "default/french"),
        ("default/french", "default/french"),
        ("french@3", "default/french"),
        ("team-a/french@12", "team-a/french"),
        ("French-V2@1", "default/French-V2"),
        (DIGEST, DIGEST),
        ("", ""),
    ],
)
def test_an_adapter_has_one_key_however_it_is_written(ref, key):
    assert adapter_key(ref) == key


def test_a_name_without_a_tenant_is_one_of_the_callers():
    assert adapter_key("french", "team-a") == adapter_key("team-a/french@2", "team-b")
    assert adapter_key(DIGEST, "team-a") == DIGEST


@pytest.mark.parametrize("ref", ["Fränzösisch", "a b", "a/b/c", "a\n", "sha256:12", "@3", "x" * 64])
def test_what_is_no_reference_has_no_key(ref):
    assert adapter_key(ref) == ""


@given(st.text())
def test_a_key_is_always_fit_for_a_header(ref):
    key = adapter_key(ref)
    assert key.isascii()
    assert key.isprintable()


@pytest.mark.parametrize("tenant", ["", "Team", "a/b", "a b"])
def test_a_tenant_that_is_none_is_refused(tenant):
    with pytest.raises(InvalidArgument, match="tenant") as caught:
        check_tenant(tenant)
    assert caught.value.subject == "tenant"


def report(value):
    return [("other", "x"), (LOAD_HEADER, value)]


def test_the_load_is_read_from_among_other_metrics():
    text = "TEXT cpu_utilization=0.3, named_metrics.num_requests=7.0,named_metrics.max_sequences=64"
    assert read_load(report(text)) == Load(7, 64)


@pytest.mark.parametrize(
    "value",
    [
        b"\x00",
        "",
        "JSON {}",
        "TEXT ",
        "TEXT ,=,",
        "TEXT named_metrics.num_requests=3",
        "TEXT named_metrics.num_requests=-1,named_metrics.max_sequences=4",
        "TEXT named_metrics.num_requests=nan,named_metrics.max_sequences=4",
        "TEXT named_metrics.num_requests=1,named_metrics.max_sequences=inf",
        "TEXT named_metrics.num_requests=1,named_metrics.max_sequences=0",
    ],
)
def test_a_load_that_makes_no_sense_is_none(value):
    assert read_load(report(value)) is None
    assert read_load(None) is None
