"""URLs of images and allowed hosts have one form, by which they are compared; addresses that a
stranger could choose are refused."""

from __future__ import annotations

import pytest

from inference_svc.pictures.fetching.addresses import AddressRefused, check_addresses
from inference_svc.pictures.fetching.hosts import (
    MAX_URL_CHARS,
    Location,
    Origin,
    checked_entries,
    parse_entry,
    parse_url,
)

URLS = {
    "https://Images.Example.com/a?b=c#d": ("images.example.com", "/a?b=c"),
    "HTTPS://images.example.com.:443": ("images.example.com", "/"),
    "https://images.example.com:8443?x=1": ("images.example.com:8443", "/?x=1"),
    "http://images.example.com/": ("http://images.example.com", "/"),
    "http://images.example.com:443/": ("http://images.example.com:443", "/"),
    "https://Bücher.example/": ("xn--bcher-kva.example", "/"),
    "https://127.0.0.1/a": ("127.0.0.1", "/a"),
    "https://[0:0::1]:8443/a": ("[::1]:8443", "/a"),
}
REFUSED = {
    "https://images.example.com@evil.example/": "a user or a password",
    "https://images.example.com\\@evil.example/": "a user or a password",
    "https://user:secret@images.example.com/": "a user or a password",
    "https://evil.example\\.images.example.com/": "missing or invalid",
    "https:///a": "missing or invalid",
    "https://images.example.com:0/": "the port",
    "https://images.example.com:99999/": "the port",
    "https://images.example.com:/": "missing or invalid",
    "https://images..example.com/": "missing or invalid",
    "https://images.example.com\n.evil.example/": "missing or invalid",
    "https://images.exam%70le.com/": "missing or invalid",
    "https://images.example.com/a b": "percent-encode",
    "https://images.example.com/\r\nX-Evil: 1": "percent-encode",
    "https://images.example.com/ä": "percent-encode",
    # Letters that browsers and Python's codec take for different names, or for digits and slashes.
    "https://fa\u00df.example/": "in ASCII",
    "https://\uff11\uff12\uff17.0.0.1/": "in ASCII",
    "https://exam\u2100ple.com/": "in ASCII",
    # Numbers that resolvers take for addresses.
    "https://2130706433/": "no IP address in its usual form",
    "https://0x7f000001/": "no IP address in its usual form",
    "https://127.1/": "no IP address in its usual form",
    "https://0177.0.0.1/": "no IP address in its usual form",
    "https://[fe80::1%25eth0]/": "missing or invalid",
    "https://[::1/": "missing or invalid",
    f"https://{'a' * 300}/": "too long",
    f"https://images.example.com/{'a' * MAX_URL_CHARS}": "characters",
    "ftp://images.example.com/": "must be an http",
}


@pytest.mark.parametrize("url", URLS)
def test_a_url_has_one_form(url: str) -> None:
    entry, target = URLS[url]
    found = parse_url(url)
    assert found == Location(parse_entry(entry), target)
    assert found.origin.entry == entry


@pytest.mark.parametrize("url", REFUSED)
def test_urls_that_others_may_read_differently_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[url]):
        parse_url(url)


def test_the_scheme_and_the_port_belong_to_an_entry() -> None:
    assert parse_entry("https://Images.example.com") == parse_entry("images.example.com:443")
    assert parse_entry("images.example.com") != parse_entry("http://images.example.com:443")
    assert parse_entry("images.example.com").authority == "images.example.com"
    assert parse_entry("[::1]:8443").authority == "[::1]:8443"


@pytest.mark.parametrize(
    "entry",
    ["*", "*.example.com", "images.example.com/a", "ftp://a.example", "a@b.example", "a:b", ""],
)
def test_an_entry_is_one_host(entry: str) -> None:
    with pytest.raises(ValueError, match="is not HOST, HOST:PORT"):
        checked_entries(("images.example.com", entry))


def test_a_password_in_an_entry_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"@b\.example") as refused:
        parse_entry("https://user:secret@b.example")
    assert "secret" not in str(refused.value)


PUBLIC = ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808")
PRIVATE = ("10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd12::1", "::ffff:10.0.0.1")
NEVER = (
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.1.1"),
    *("224.0.0.1", "255.255.255.255", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "ff02::1", "fd00:ec2::254", "fec0::1"),
    *("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("2002:7f00:1::", "2001:0:7f00:1::"),
    *("64:ff9b:1::7f00:1", "64:ff9b:1:7f00:0:100::", "64:ff9b:1:fffe::a9fe:a9fe"),
    *("::ffff:0:127.0.0.1", "::ffff:0:8.8.8.8", "192.0.0.8", "192.0.0.170"),
)


@pytest.mark.parametrize("address", [*PUBLIC, *PRIVATE, *NEVER])
@pytest.mark.parametrize("scheme", ["https", "http"])
def test_a_names_addresses_are_checked(scheme: str, address: str) -> None:
    """With TLS the certificate proves the host, so that it may be in a private network."""
    origin = Origin(scheme, "images.example.com", 443)
    if address in PUBLIC or (scheme == "https" and address in PRIVATE):
        check_addresses(origin, [address])
        return
    with pytest.raises(AddressRefused, match="has the address"):
        check_addresses(origin, ["8.8.8.8", address])
