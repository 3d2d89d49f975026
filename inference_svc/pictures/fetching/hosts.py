"""The URLs of images, and the hosts that a server may fetch them from."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from servicekit.errors import InvalidArgument
from servicekit.settings.addresses import shown

MAX_URL_CHARS = 8192
"""Holds a URL with a signature; servers refuse longer ones."""
MAX_HOST_CHARS = 253
"""The longest name in the DNS."""
MAX_SHOWN_CHARS = 64
"""How much of a host's name or of a scheme an error quotes."""
DEFAULT_PORTS = {"https": 443, "http": 80}

_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE | re.ASCII | re.DOTALL)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[^:\[\]@\s]+)(?::([0-9]{1,5}))?")
_TARGET = re.compile(r"[\x21-\x7e]*", re.ASCII)
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*", re.ASCII)
_NUMBER = re.compile(r"([0-9]+|0x[0-9a-f]*)", re.ASCII)


class Origin(NamedTuple):
    """Where a server answers: `host` is a name in lower case ASCII (IDNA), or an address in its
    shortest form, IPv6 without brackets."""

    scheme: str
    host: str
    port: int

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host, if it is an address and no name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """The host, and the port unless it is the scheme's, as the header Host has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def entry(self) -> str:
        """The origin as `--image-hosts` has it."""
        return self.authority if self.scheme == "https" else f"{self.scheme}://{self.authority}"


class Location(NamedTuple):
    """An image elsewhere. `target` is the path with its query, which may have secrets: it is for
    the host alone, never for logs, errors or metrics."""

    origin: Origin
    target: str


class Wanted(NamedTuple):
    """An image to fetch, which its caller has named `where`."""

    location: Location
    where: str


def not_allowed(wanted: Wanted) -> InvalidArgument:
    """Returns the error for a URL whose host the operator has not allowed."""
    entry = wanted.location.origin.entry[:MAX_SHOWN_CHARS]
    return InvalidArgument(
        f"{wanted.where}: the server fetches nothing from {entry!a}: send the image itself as "
        "data:image/...;base64,..., or have the server's operator add the host to --image-hosts",
        subject=wanted.where,
    )


def is_url(text: str) -> bool:
    """Whether a text is meant as a URL of HTTP."""
    return text[:8].lower().startswith(("http://", "https://"))


def parse_url(url: str) -> Location:
    """Returns where a URL's image is. Raises ValueError with the reason."""
    if len(url) > MAX_URL_CHARS:
        raise ValueError(f"the URL has more than {MAX_URL_CHARS} characters")
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError("must be an http(s) URL")
    scheme, authority, target = found[1].lower(), found[2], found[3]
    if "@" in authority:
        raise ValueError("a URL with a user or a password is refused")
    if _TARGET.fullmatch(target) is None:
        raise ValueError("percent-encode the spaces and other characters of the URL's path")
    return Location(_origin(scheme, authority), target if target[:1] == "/" else f"/{target}")


def parse_entry(text: str) -> Origin:
    """Returns an allowed origin, written as HOST[:PORT], https:// or not, or http://HOST[:PORT].
    Raises ValueError."""
    scheme, separator, authority = text.rpartition("://")
    try:
        return _origin(scheme.lower() if separator else "https", authority)
    except ValueError as error:
        raise ValueError(
            f"{shown(text[:MAX_SHOWN_CHARS])} is not HOST, HOST:PORT or http://HOST:PORT: {error}"
        ) from None


def checked_entries(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the entries as they are. Raises ValueError if one names no origin."""
    for each in entries:
        parse_entry(each)
    return entries


def parse_entries(entries: Iterable[str]) -> frozenset[Origin]:
    """Returns the allowed origins. Raises ValueError."""
    return frozenset(map(parse_entry, entries))


def _origin(scheme: str, authority: str) -> Origin:
    found = _AUTHORITY.fullmatch(authority)
    if scheme not in DEFAULT_PORTS:
        raise ValueError("only https and http are known")
    if found is None:
        raise ValueError("the host is missing or invalid")
    port = int(found[2]) if found[2] else DEFAULT_PORTS[scheme]
    if not 0 < port < 1 << 16:
        raise ValueError("the port is invalid")
    return Origin(scheme, _host(found[1]), port)


def _host(text: str) -> str:
    """Returns a host in its one form, by which hosts are compared. Raises ValueError."""
    if len(text) > MAX_HOST_CHARS:
        raise ValueError("the host is too long")
    name = text if text.startswith("[") else _name(text.lower().removesuffix("."))
    # Resolvers take 127.1 and 0x7f000001 for addresses: only their usual form is one here.
    if name.startswith("[") or _NUMBER.fullmatch(name.rpartition(".")[2]):
        try:
            return str(ipaddress.ip_address(name.strip("[]")))
        except ValueError:
            raise ValueError("the host is a number, and no IP address in its usual form") from None
    return name


def _name(text: str) -> str:
    """Returns a name in ASCII. Raises ValueError."""
    try:
        name = text.encode("idna")
        is_same = name.decode("idna") == text
    except UnicodeError:
        raise ValueError("the host is missing or invalid") from None
    if not is_same and not text.isascii():
        # The codec's older rules make another name of some letters than browsers do.
        raise ValueError("write the host in ASCII, as xn--...")
    if _NAME.fullmatch(name.decode()) is None:
        raise ValueError("the host is missing or invalid")
    return name.decode()
