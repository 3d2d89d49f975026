"""Addresses of settings, and values as errors show them."""

from __future__ import annotations

import re

from servicekit.telemetry.redact import HIDDEN

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):([0-9]{1,5})")


def shown(value: object) -> str:
    """Returns a value for an error, without the part of an address before its host, which may be a
    password. This applies to any value: an invalid one may be half of an address."""
    text = repr(value)
    return text if "@" not in text else f"'{HIDDEN}{text[text.rindex('@') :]}"


def split_address(address: str) -> tuple[str, int]:
    """Returns "HOST:PORT" or "[V6]:PORT" as (host, port). Raises ValueError."""
    match = _ADDRESS.fullmatch(address)
    if not match or int(match[2]) > 65535:
        raise ValueError(f"{shown(address)} is not HOST:PORT")
    return match[1].strip("[]"), int(match[2])
