"""loadout-digest-v1: the identity of an adapter.

The digest is the sha256 of these lines, each ended by one newline, all JSON canonical (sorted keys,
no spaces, ASCII):

    loadout-digest-v1
    ["<target>","<role>","<dtype>",[<shape>],"<sha256 of the raw bytes>"]
        ... one per tensor, sorted as lists
    {"alpha":{"<target>":<alpha>, ...},"experts":{"<target>":<number>, ...},
     "invocation_tokens":[<token>, ...],"is_tied":true,"modules":{...},
     "order":{"<target>":"<order>", ...},"rows":{"<target>":[<token>, ...], ...},
     "scale":{"<target>":<scale>, ...},"use_rslora":true}

Roles are A [rank, in] and B [out, rank], embedding_A and embedding_B, and, of MLX-LM, A_transposed
[in, rank] and B_transposed [rank, out]: with the same bytes and shapes they are another adapter;
B_bias [out] and, of DoRA, magnitude [out]; of replacements of the base's weights full, as the base
has it, copy, the same where it was only saved along, on which verdicts depend, and rows [rows,
features]. A target is the module's path in the language model, as its trainer called it; a bias of
the base ends with ".bias". A and B of a parameter of several experts are parameter_A and
parameter_B, in stacks experts_A and experts_B; where only the release of PEFT that saved it decides
the features of its A, "order" names them, unless they are the inputs: "first" (the first dimension)
before 0.19, "outputs" in 0.19.0.

Roles and fields may be added; none ever changes the digest of an adapter without them.

Raw bytes are little-endian and row-major, shapes as saved. The last line holds the settings that
change the maths besides the tensors, resolved per target, defaults (alpha 8, no rsLoRA) left out; a
target whose config gives the scale itself has that, of any value, and no alpha: ranks are in the
shapes, and how a pattern was spelled does not matter. `modules` is there only if the config lists a
module of which the file has no weights at all: then the fields that choose modules decide whether a
model refuses the adapter, and a verdict must follow from the digest alone. `is_tied` is of
adapters that change the embedding or the head with ensure_weight_tying. A module that has the
rows of another, and no tensor, is in `rows` by the name that the config has. So the file layout,
tensor order, sharding and training-only settings leave the digest alone; another dtype or scale
does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adapter_store.checkpoint.peft.config import AdapterConfig
from adapter_store.checkpoint.peft.extras import EMBEDDINGS
from adapter_store.checkpoint.peft.tensor_keys import recorded_name
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.checkpoint.weights import (
    Changes,
    ExpertWeights,
    ParameterOrder,
    Replacement,
)

DEFAULT_ALPHA = 8
_CANONICAL = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
)


def compute_digest(
    config: AdapterConfig, changes: Iterable[Changes], sha256: Mapping[str, bytes]
) -> str:
    """Returns the digest, "sha256:<hex>". `sha256` holds the hash of each tensor's raw bytes, by
    tensor key."""
    changes = tuple(changes)
    records = sorted(
        [
            recorded_name(each.module),
            role,
            record.dtype.value,
            list(record.shape),
            sha256[record.key].hex(),
        ]
        for each in changes
        for role, record in each.records()
    )
    lines = ["loadout-digest-v1", *map(canonical_json, records)]
    lines.append(canonical_json(_maths(config, changes)))
    return sha256_text("".join(f"{line}\n" for line in lines))


def _maths(config: AdapterConfig, changes: Iterable[Changes]) -> dict[str, Any]:
    """Returns the settings that change the maths besides the tensors, without defaults."""
    changes = list(changes)
    targets = [each for each in changes if isinstance(each, TargetWeights | ExpertWeights)]
    replacements = [each for each in changes if isinstance(each, Replacement)]
    modules = {change.module.rpartition(".")[2] for change in changes}
    maths = {
        **_maths_of_targets(targets),
        "rows": _rows(replacements),
        "invocation_tokens": list(config.extras.invocation_tokens),
        "is_tied": config.extras.ties_embeddings and not EMBEDDINGS.isdisjoint(modules),
        "use_rslora": bool(config.use_rslora),
    }
    maths = {name: value for name, value in maths.items() if value}
    if config.modules.unweighted(target.module for target in targets):
        maths["modules"] = config.modules.fields
    return maths


def _maths_of_targets(targets: Iterable[TargetWeights | ExpertWeights]) -> dict[str, Any]:
    """Returns what each target has besides its tensors, by setting and module."""
    alphas, scales, experts, orders = {}, {}, {}, {}
    for target in targets:
        name = recorded_name(target.module)
        if target.alpha is None:
            scales[name] = _number(target.scale)
        elif target.alpha != DEFAULT_ALPHA:
            alphas[name] = _number(target.alpha)
        if isinstance(target, ExpertWeights):
            experts[name] = target.num_experts
            if target.order is not ParameterOrder.INPUTS:
                orders[name] = target.order.value
    return {"alpha": alphas, "scale": scales, "experts": experts, "order": orders}


def _rows(replacements: Sequence[Replacement]) -> dict[str, list[int]]:
    """Returns the ids of replaced rows, by module."""
    rows = {
        recorded_name(each.module): list(each.row_ids)
        for each in replacements
        if each.row_ids is not None
    }
    return rows | {
        name: rows[recorded_name(each.module)] for each in replacements for name in each.shared_by
    }


def canonical_json(value: Any) -> str:
    """Returns the one spelling that identities are computed from."""
    return _CANONICAL.encode(value)


def sha256_text(text: str) -> str:
    """Returns "sha256:<hex>" of UTF-8 text: the form of every identity in the system."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _number(value: float) -> float:
    """Returns one spelling for 16 and 16.0."""
    return int(value) if value == int(value) else value
