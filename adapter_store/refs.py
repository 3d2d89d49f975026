"""References as callers write them: `[tenant/]name[@version]` or `sha256:<hex>`."""

from __future__ import annotations

import re

from adapter_store.core import AdapterName, AdapterRef
from servicekit.errors import InvalidArgument

DEFAULT_TENANT = "default"

_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


def parse_name(text: str, field: str = "name", home: str = DEFAULT_TENANT) -> AdapterName:
    """Reads `[tenant/]name`, without a tenant of tenant `home`. Raises InvalidArgument naming
    `field`."""
    tenant, slash, name = text.rpartition("/")
    if not slash:
        tenant = home
    for part, value in (("tenant", tenant), ("name", name)):
        if not _PART.fullmatch(value):
            raise InvalidArgument(
                f"{field}: {part} {_shown(value)} is not of the form [a-z0-9][a-z0-9._-]{{0,62}}",
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
            f"{field}: version {_shown(version)} is not a positive whole number", subject=field
        )
    return AdapterRef(name=parse_name(name, field, home), version=int(version))


def parse_sha256(text: str, field: str) -> str:
    """Checks a `sha256:<64 hex digits>` identity. Raises InvalidArgument naming `field`."""
    if not _SHA256.fullmatch(text):
        raise InvalidArgument(
            f"{field}: {_shown(text)} is not sha256: and 64 lower-case hex digits", subject=field
        )
    return text


def _shown(value: str) -> str:
    """The caller's text, short enough to go into a message."""
    return repr(value if len(value) <= 80 else value[:77] + "...")
