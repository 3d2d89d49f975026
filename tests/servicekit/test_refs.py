from __future__ import annotations

import pytest

from servicekit.errors import InvalidArgument
from servicekit.refs import AdapterName, AdapterRef, parse_name, parse_ref, parse_sha256

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", AdapterRef(AdapterName("default", "a"))),
        ("team/a.b-c_d", AdapterRef(AdapterName("team", "a.b-c_d"))),
        ("team/Qwen3-SQL@2", AdapterRef(AdapterName("team", "Qwen3-SQL"), 2)),
        ("team/a@12", AdapterRef(AdapterName("team", "a"), 12)),
        ("0" * 63, AdapterRef(AdapterName("default", "0" * 63))),
        (DIGEST, AdapterRef(digest=DIGEST)),
    ],
)
def test_references(text, expected):
    assert parse_ref(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".a",
        "Team/a",
        "a/b/c",
        "/a",
        "a/",
        "a" * 64,
        "a\n",
        "a@0",
        "a@-1",
        "a@01",
        "a@1\n",
        "a@",
        "a@1@2",
        "ä",
        "../a",
        "sha256:" + "0A" * 32,
        "sha256:" + "0a" * 31,
        DIGEST + "\n",
    ],
)
def test_malformed_references_name_the_field(text):
    with pytest.raises(InvalidArgument, match=r"^adapter: ") as caught:
        parse_ref(text, "adapter")
    assert caught.value.subject == "adapter"


def test_what_is_before_a_slash_is_the_tenant():
    with pytest.raises(InvalidArgument, match=r"tenant 'Qwen' .* before a slash is the tenant"):
        parse_name("Qwen/sql", home="acme")


def test_a_name_takes_no_version():
    with pytest.raises(InvalidArgument, match="name"):
        parse_name("a@1")


def test_digests_are_whole():
    assert parse_sha256(DIGEST, "digest") == DIGEST
    with pytest.raises(InvalidArgument, match="digest"):
        parse_sha256(DIGEST[7:], "digest")


def test_a_long_value_is_shortened_in_the_message():
    with pytest.raises(InvalidArgument) as caught:
        parse_ref("x" * 100_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["a", "a@3"])
def test_a_name_without_a_tenant_is_of_the_callers_home(text):
    assert parse_ref(text, home="team-a").name == AdapterName("team-a", "a")
    assert parse_ref(f"team-b/{text}", home="team-a").name == AdapterName("team-b", "a")
