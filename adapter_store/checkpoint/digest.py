"""loadout-digest-v1: what makes two adapters the same adapter.

The sha256 of these lines, each ended by one newline, all JSON canonical (sorted keys, no spaces,
ASCII):

    loadout-digest-v1
    ["<target>","<A|B|embedding_A|embedding_B>","<dtype>",[<shape>],"<sha256 of the raw bytes>"]
        ... one per tensor, sorted as lists
    {"alpha":{"<target>":<alpha>, ...},"modules":{...},"use_rslora":true}

Raw bytes are little-endian and row-major, shapes as saved. The last line holds what changes the
maths besides the tensors, resolved per target, defaults (alpha 8, no rsLoRA) left out: ranks are
in the shapes, and how a pattern was spelled does not matter. `modules` is there only if the config
lists a module of which the file has no weights at all: then the fields that choose modules decide
whether a model refuses the adapter, and a verdict must follow from the digest alone. So the file
layout, tensor order, sharding and training-only settings leave the digest alone; another dtype or
scale does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapter_store.core import DataType, SegmentKind, TargetKind

DEFAULT_ALPHA = 8

_ROLES = {
    (TargetKind.LINEAR, SegmentKind.A): "A",
    (TargetKind.LINEAR, SegmentKind.B): "B",
    (TargetKind.EMBEDDING, SegmentKind.A): "embedding_A",
    (TargetKind.EMBEDDING, SegmentKind.B): "embedding_B",
}


@dataclass(frozen=True, slots=True)
class TensorContent:
    """One tensor as the digest sees it; `sha256` is of its raw bytes."""

    target: str
    kind: TargetKind
    side: SegmentKind
    dtype: DataType
    shape: tuple[int, ...]
    sha256: bytes


def compute_digest(
    tensors: Iterable[TensorContent],
    alphas: Mapping[str, float],
    use_rslora: bool,
    modules: Mapping[str, Any] | None = None,
) -> str:
    """The digest, "sha256:<hex>". `alphas` holds the effective alpha of every target."""
    records = sorted(
        [t.target, _ROLES[t.kind, t.side], t.dtype.value, list(t.shape), t.sha256.hex()]
        for t in tensors
    )
    maths: dict[str, Any] = {}
    changed = {name: _number(alpha) for name, alpha in alphas.items() if alpha != DEFAULT_ALPHA}
    if changed:
        maths["alpha"] = changed
    if modules:
        maths["modules"] = modules
    if use_rslora:
        maths["use_rslora"] = True
    lines = ["loadout-digest-v1", *map(canonical_json, records), canonical_json(maths)]
    return sha256_text("".join(f"{line}\n" for line in lines))


def canonical_json(value: Any) -> str:
    """The one spelling that identities are computed from."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def sha256_text(text: str) -> str:
    """ "sha256:<hex>" of UTF-8 text: the form of every identity in the system."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _number(value: float) -> float:
    """16 and 16.0 are one alpha."""
    return int(value) if value == int(value) else value
