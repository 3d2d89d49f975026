"""Values of `adapter_config.json`, read as hostile: each of its type and within bounds, or refused.

Every function raises InvalidAdapter with the key as its subject.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.json import show
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import CONFIG_FILE


def read_rank(key: str, value: Any, limits: CheckpointLimits) -> int:
    """Returns a positive integer. Raises InvalidAdapter."""
    if type(value) is not int or value < 1:
        raise invalid_value(key, value, "a rank is a positive integer")
    if value > limits.max_rank:
        raise invalid_value(
            key, value, f"over this store's limit of {limits.max_rank}", "RANK_TOO_LARGE"
        )
    return value


def read_number(key: str, value: Any, what: str) -> float:
    """Returns a finite number. `what` names the value in errors. Raises InvalidAdapter."""
    # An integer may be too large for a float; a float may be infinite (1e999).
    if type(value) not in (int, float) or not abs(value) <= 1e30:
        raise invalid_value(key, value, f"{what} is a finite number")
    return float(value)


def read_flag(fields: Mapping[str, Any], key: str) -> bool:
    """Returns a flag; False when absent. Raises InvalidAdapter."""
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise invalid_value(key, value, "not true or false")
    return bool(value)


def read_text(fields: Mapping[str, Any], key: str) -> str:
    """Returns a printable string of at most 1,024 characters; "" when absent. Raises
    InvalidAdapter."""
    value = fields.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 1024 or not (value.isprintable()):
        raise invalid_value(key, value, "not a printable string")
    return value


def read_names(fields: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """Returns a pattern, or a list of names; () when absent. Raises InvalidAdapter."""
    value = fields.get(key)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise invalid_value(key, value, "not a string or a list of names")
    return tuple(value)


def invalid_value(
    key: str, value: Any, detail: str, reason: str = "CONFIG_INVALID"
) -> InvalidAdapter:
    return InvalidAdapter(
        f"{CONFIG_FILE}: {key}={show(value)}: {detail}", subject=key, reason=reason
    )
