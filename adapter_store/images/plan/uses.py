"""An adapter's changes of one target, and the error of changes that do not fit."""

from __future__ import annotations

from typing import NamedTuple

from adapter_store.checkpoint.weights import Changes
from adapter_store.errors import IncompatibleAdapter
from contract.images.targets import OtherName, Target


class Use(NamedTuple):
    """An adapter's weights for the target at `column` of a layout. `other` is their name in the
    adapter, if not the target's own; `module_outputs` are the outputs of the module of this name.
    `is_transposed`: the model has its parameter as [experts, in, out]."""

    column: int
    target: Target
    changes: Changes
    other: OtherName | None = None
    module_outputs: int = 0
    is_transposed: bool = False


def key_of(changes: Changes) -> str:
    _role, record = next(changes.records())
    return record.key


def incompatible(key: str, reason: str, detail: str) -> IncompatibleAdapter:
    return IncompatibleAdapter(f"{key}: {detail}", subject=key, reason=reason)
