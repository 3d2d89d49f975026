"""Adapter references: "[tenant/]name[@version]" or "sha256:<hex>"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from servicekit.errors import InvalidArgument

DEFAULT_TENANT = "default"

_PART = r"[a-z0-9][a-z0-9._-]{0,62}"
_NAME = re.compile(rf"(?:({_PART})/)?({_PART})(?:@([1-9][0-9]{{0,8}}))?", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A name ("tenant/name") with or without version, or a digest; the other fields are empty."""

    name: str = ""
    version: int = 0
    digest: str = ""

    def __str__(self) -> str:
        """The canonical form: equal references are equal strings."""
        if self.digest:
            return self.digest
        return f"{self.name}@{self.version}" if self.version else self.name


def parse_ref(text: str, subject: str = "adapter", home: str = DEFAULT_TENANT) -> AdapterRef:
    """A name without a tenant is one of tenant `home`. Raises InvalidArgument, naming the field
    `subject`."""
    if _DIGEST.fullmatch(text):
        return AdapterRef(digest=text)
    match = _NAME.fullmatch(text)
    if match is None:
        raise InvalidArgument(
            f"{subject} {text[:200]!r} is neither [tenant/]name[@version] nor sha256:<hex>",
            subject=subject,
        )
    tenant, name, version = match.groups()
    return AdapterRef(f"{tenant or home}/{name}", int(version or 0))


def tenant_of(name: str) -> str:
    """The tenant in "tenant/name"."""
    return name.partition("/")[0]


def short_name(name: str, home: str = DEFAULT_TENANT) -> str:
    """ "tenant/name" as callers of tenant `home` may write it: without their tenant."""
    return name.removeprefix(f"{home}/")
