"""loadout-digest-v1: what makes two adapters the same adapter.

The digest is the sha256 of these lines, each ended by one newline, all JSON canonical (sorted keys,
no spaces, ASCII):

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
from collections.abc import Mapping
from typing import Any

from adapter_store.checkpoint.peft_config import AdapterConfig
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.core import SegmentKind, TargetKind

DEFAULT_ALPHA = 8
_CANONICAL = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
)

_ROLES = {
    (TargetKind.LINEAR, SegmentKind.A): "A",
    (TargetKind.LINEAR, SegmentKind.B): "B",
    (TargetKind.EMBEDDING, SegmentKind.A): "embedding_A",
    (TargetKind.EMBEDDING, SegmentKind.B): "embedding_B",
}


def compute_digest(
    config: AdapterConfig, targets: Mapping[str, TargetWeights], sha256: Mapping[str, bytes]
) -> str:
    """Returns the digest, "sha256:<hex>". `sha256` holds the hash of each tensor's raw bytes, by
    tensor key."""
    records = sorted(
        [
            target.name,
            _ROLES[target.kind, side],
            record.dtype.value,
            list(record.shape),
            sha256[record.key].hex(),
        ]
        for target in targets.values()
        for side, record in ((SegmentKind.A, target.a), (SegmentKind.B, target.b))
    )
    lines = ["loadout-digest-v1", *map(canonical_json, records)]
    lines.append(canonical_json(_maths(config, targets)))
    return sha256_text("".join(f"{line}\n" for line in lines))


def _maths(config: AdapterConfig, targets: Mapping[str, TargetWeights]) -> dict[str, Any]:
    """Returns what changes the maths besides the tensors, without defaults."""
    maths: dict[str, Any] = {}
    alphas = {
        name: _number(target.alpha)
        for name, target in targets.items()
        if target.alpha != DEFAULT_ALPHA
    }
    if alphas:
        maths["alpha"] = alphas
    if config.modules.unweighted(target.module for target in targets.values()):
        maths["modules"] = config.modules.fields
    if config.use_rslora:
        maths["use_rslora"] = True
    return maths


def canonical_json(value: Any) -> str:
    """Returns the one spelling that identities are computed from."""
    return _CANONICAL.encode(value)


def sha256_text(text: str) -> str:
    """Returns "sha256:<hex>" of UTF-8 text: the form of every identity in the system."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _number(value: float) -> float:
    """Returns one spelling for 16 and 16.0."""
    return int(value) if value == int(value) else value
