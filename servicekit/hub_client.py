"""Keeps a client of the Hugging Face Hub's library to hosts that it may go to.

The Hub redirects to the hosts that keep large files. Hugging Face's hosts are known; any other host
that a server names could lie anywhere, also inside this network. The token goes to the Hub's own
address alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

REDIRECT_HOSTS = ("huggingface.co", "hf.co")
"""Hugging Face's own, each with all hosts below it."""
_PORTS = {"http": 80, "https": 443}
_STORAGE = "X-Xet-Cas-Url"
"""The header by which the Hub names the storage that the library then downloads from by itself."""


class ForeignHost(Exception):
    """Raised instead of a request to a host that is not on the list, or of a request that would
    send the token to another host than the Hub's."""

    def __init__(self, server: str, *, has_token: bool = False) -> None:
        what = " with the token" if has_token else ""
        super().__init__(f"the Hub sends it{what} to {server}")


class _Server(NamedTuple):
    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> _Server:
        """Raises ValueError."""
        found = urlsplit(url)
        return cls(found.scheme, found.hostname or "", found.port or _PORTS.get(found.scheme, 0))

    def __str__(self) -> str:
        port = "" if self.port == _PORTS.get(self.scheme, 0) else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}"


class HubHosts:
    """The hosts that a client of the Hub at `endpoint` may go to: the Hub's own and the listed
    hosts, with all hosts below each. None of them without TLS, unless the Hub itself has none."""

    def __init__(self, endpoint: str, redirect_hosts: Iterable[str]) -> None:
        hub = self._hub = _Server.of(endpoint)
        self._with_token = {hub, hub._replace(scheme="https", port=_PORTS["https"])}
        self._redirect_hosts = tuple(host.lower() for host in redirect_hosts)

    def check(self, url: str, *, has_token: bool = False) -> None:
        """Raises ForeignHost."""
        try:
            server = _Server.of(url)
        except ValueError:
            raise ForeignHost("an invalid address") from None
        if server in self._with_token:
            return
        host = server.host
        is_listed = any(host == each or host.endswith(f".{each}") for each in self._redirect_hosts)
        is_safe = server.scheme in ("https", self._hub.scheme)
        if has_token or not is_listed or not is_safe:
            raise ForeignHost(str(server), has_token=has_token)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps all calls of the Hub's library to these hosts while the context lasts."""
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils._http import default_client_factory

        set_client_factory(self.make_client)
        try:
            yield
        finally:
            set_client_factory(default_client_factory)

    def make_client(self) -> Any:
        """Returns a client as the Hub's library makes them, which goes to these hosts alone."""
        from huggingface_hub.utils._http import default_client_factory

        client = default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [self._check_request, *hooks["request"]],
            "response": [self._check_response, *hooks["response"]],
        }
        return client

    def _check_request(self, request: Any) -> None:
        """Is called for redirects, too."""
        self.check(str(request.url), has_token="Authorization" in request.headers)

    def _check_response(self, response: Any) -> None:
        storage = response.headers.get(_STORAGE)
        if storage:
            self.check(storage)
