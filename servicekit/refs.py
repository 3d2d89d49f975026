"""References as callers write them: `[tenant/]name[@version]` or `sha256:<hex>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from servicekit.errors import InvalidArgument

DEFAULT_TENANT = "default"

_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_NAME_FORM = "write [tenant/]name"
_REF_FORM = "write [tenant/]name[@version] or sha256:<hex>"
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A name without its version."""

    tenant: str
    name: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A name, a name at a version, or a digest."""

    name: AdapterName | None = None
    version: int | None = None
    digest: str | None = None

    def __str__(self) -> str:
        """The canonical form: equal references are equal strings."""
        if self.name is None:
            return str(self.digest)
        return f"{self.name}@{self.version}" if self.version else str(self.name)


def parse_name(text: str, field: str = "name", home: str = DEFAULT_TENANT) -> AdapterName:
    """Reads `[tenant/]name`; the tenant is `home` unless the text names one. Raises
    InvalidArgument naming `field`."""
    tenant, slash, name = text.rpartition("/")
    if not slash:
        tenant = home
    if not _TENANT.fullmatch(tenant):
        raise InvalidArgument(
            f"{field}: tenant {_shown(tenant)} is not of the form {_TENANT.pattern}; the part "
            f"before a slash is the tenant, and a name without a slash is in {_shown(home)}",
            subject=field,
        )
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{field}: name {_shown(name)} is not of the form {_NAME.pattern}: {_NAME_FORM}",
            subject=field,
        )
    return AdapterName(tenant, name)


def parse_ref(text: str, field: str = "ref", home: str = DEFAULT_TENANT) -> AdapterRef:
    """Reads a name, a name at a version, or a digest. Raises InvalidArgument naming `field`."""
    if text.startswith("sha256:"):
        return AdapterRef(digest=parse_sha256(text, field))
    name, at, version = text.partition("@")
    if not at:
        return AdapterRef(name=parse_name(name, field, home))
    if not _VERSION.fullmatch(version):
        raise InvalidArgument(
            f"{field}: version {_shown(version)} is not a positive whole number: {_REF_FORM}",
            subject=field,
        )
    return AdapterRef(name=parse_name(name, field, home), version=int(version))


def parse_sha256(text: str, field: str) -> str:
    """Checks a `sha256:<64 hex digits>` identity. Raises InvalidArgument naming `field`."""
    if not _SHA256.fullmatch(text):
        raise InvalidArgument(
            f"{field}: {_shown(text)} is not sha256: and 64 lower-case hex digits", subject=field
        )
    return text


def tenant_of(name: str) -> str:
    """The tenant in "tenant/name"."""
    return name.partition("/")[0]


def short_name(name: str, home: str = DEFAULT_TENANT) -> str:
    """ "tenant/name" as callers of tenant `home` may write it: without their tenant."""
    return name.removeprefix(f"{home}/")


def _shown(value: str) -> str:
    """The caller's text, short enough to go into a message."""
    return repr(value if len(value) <= 80 else value[:77] + "...")
