"""The metadata of calls that serves routing: the adapter key, and the load of a replica.

Proxies use the same: they hash ADAPTER_HEADER (deploy/envoy) and may read LOAD_HEADER.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from loadout.errors import InvalidArgument

ADAPTER_HEADER = "x-adapter-id"
"""Request metadata: the adapter's key. Calls for the base model have none."""

LOAD_HEADER = "endpoint-load-metrics"
"""Trailing metadata of every response: the load in ORCA's format, "TEXT name=value,..."."""

DEFAULT_TENANT = "default"

_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NAME = re.compile(
    rf"(?:({_TENANT.pattern})/)?([A-Za-z0-9][A-Za-z0-9._-]{{0,62}})(?:@[0-9]{{1,9}})?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def check_tenant(tenant: str) -> None:
    """Raises InvalidArgument."""
    if not _TENANT.fullmatch(tenant):
        raise InvalidArgument(
            f"tenant: {tenant[:200]!r} is not lower-case letters, digits, '.', '_' and '-'",
            code="INVALID_ARGUMENT",
            subject="tenant",
        )


def adapter_key(ref: str, tenant: str = DEFAULT_TENANT) -> str:
    """Returns one key for every way to write an adapter's name: "tenant/name", without version, so
    that an adapter's versions stay together. A digest is its own key.

    `tenant` completes a name without one. The result is "" for the base model and for an invalid
    reference, which any replica may refuse.
    """
    if _DIGEST.fullmatch(ref):
        return ref
    match = _NAME.fullmatch(ref)
    return f"{match[1] or tenant}/{match[2]}" if match else ""


@dataclass(frozen=True, slots=True)
class Load:
    """`num_requests` run or wait at a replica that runs `max_sequences` at once."""

    num_requests: int
    max_sequences: int


def read_load(metadata: Iterable[tuple[str, str | bytes]] | None) -> Load | None:
    """Returns the load in a response's metadata; None if there is none that is well-formed."""
    for key, value in metadata or ():
        if key == LOAD_HEADER and isinstance(value, str) and value.startswith("TEXT "):
            numbers = dict(entry.strip().partition("=")[::2] for entry in value[5:].split(","))
            num_requests = _count(numbers.get("named_metrics.num_requests", ""))
            max_sequences = _count(numbers.get("named_metrics.max_sequences", ""))
            if num_requests is not None and max_sequences:
                return Load(num_requests, max_sequences)
    return None


def _count(text: str) -> int | None:
    try:
        number = float(text.strip())
    except ValueError:
        return None
    return int(number) if 0 <= number < math.inf else None
