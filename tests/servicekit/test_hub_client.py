"""Where a client of the Hub may go, and with the token."""

from __future__ import annotations

import pytest

from servicekit.hub_client import REDIRECT_HOSTS, ForeignHost, HubHosts

HUB, LOCAL, LISTED = "https://huggingface.co", "http://hub.test:8080", ("cdn.test",)


@pytest.mark.parametrize(
    ("endpoint", "hosts", "url"),
    [
        (HUB, (), f"{HUB}/api/models/a"),
        (HUB, (), "https://HuggingFace.co:443/api"),
        (HUB, REDIRECT_HOSTS, "https://cdn-lfs-us-1.hf.co/file?Signature=x"),
        (HUB, REDIRECT_HOSTS, "https://cas-bridge.xethub.hf.co/file"),
        (HUB, REDIRECT_HOSTS, "https://cdn-lfs.huggingface.co/file"),
        ("https://user:password@hub.test", (), "https://hub.test/x"),
        (LOCAL, LISTED, "http://cdn.test:9000/x"),
        (LOCAL, LISTED, "https://a.cdn.test/x"),
        (HUB, ("CDN.test",), "https://cdn.test/x"),
    ],
)
def test_hosts_that_it_may_go_to(endpoint, hosts, url):
    HubHosts(endpoint, hosts).check(url)


@pytest.mark.parametrize(
    ("endpoint", "hosts", "url"),
    [
        (HUB, (), "https://cdn-lfs.hf.co/file"),
        (HUB, REDIRECT_HOSTS, "https://nothf.co/"),
        (HUB, REDIRECT_HOSTS, "https://hf.co.test/"),
        (HUB, REDIRECT_HOSTS, "https://hf.co@10.0.0.1/"),
        (HUB, REDIRECT_HOSTS, "http://hf.co/"),
        (HUB, (), "http://huggingface.co/"),
        (HUB, (), "https://huggingface.co:8443/"),
        (LOCAL, LISTED, "http://hub.test:22/"),
        (LOCAL, LISTED, "ftp://cdn.test/"),
        (LOCAL, LISTED, "file:///etc/passwd"),
        (LOCAL, LISTED, "http://[::1/"),
        (LOCAL, LISTED, "http://cdn.test:port/"),
    ],
)
def test_hosts_that_it_may_not_go_to(endpoint, hosts, url):
    with pytest.raises(ForeignHost):
        HubHosts(endpoint, hosts).check(url)


def test_the_token_goes_to_the_hub_alone():
    for endpoint, own in (
        (HUB, HUB),
        (LOCAL, LOCAL),
        ("http://hub.test", "https://hub.test"),
        ("http://hub.test:80", "http://hub.test"),
    ):
        HubHosts(endpoint, LISTED).check(f"{own}/x", has_token=True)
    for url in ("https://cdn.test/", "http://hub.test/", "https://hub.test:8443/"):
        with pytest.raises(ForeignHost, match="with the token to"):
            HubHosts(LOCAL, LISTED).check(url, has_token=True)
