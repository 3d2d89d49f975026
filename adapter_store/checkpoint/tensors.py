"""An adapter's tensors: the names that trainers give them, and the targets they make up in pairs.

PEFT's, and those of all who write its files:

    base_model.model.<module>.lora_A.weight            [rank, in]
    base_model.model.<module>.lora_B.weight            [out, rank]
    base_model.model.<module>.lora_embedding_A         [rank, vocab]
    base_model.model.<module>.lora_embedding_B         [hidden, rank]
    base_model.model.<module>.lora_B.bias              [out]
    base_model.model.<module>.lora_magnitude_vector    [out]; of an embedding [hidden]

`<module>` is the module's path in the model that was trained, "model.layers.0.self_attn.q_proj";
the config's patterns match it. An adapter saved from a whole state dict has its own name in
between: `lora_A.<name>.weight`. One that was adapted twice has the prefix twice. A model with more
than text has its language model inside: `language_model.model.layers.0` (older transformers),
`model.language_model.layers.0` (newer); the target is the path in the language model alone. A
trainer that saves the model's own names leaves the prefix out: without it the rest is the module's
path all the same. Tinker calls the head `model.unembed_tokens`.

Every tensor belongs to one target, and every target is one that the config selects, with what the
config says that it has.

Sources: peft/utils/save_and_load.py `get_peft_model_state_dict` of PEFT 0.21;
tinker_cookbook/weights/_merge_utils.py of github.com/thinking-machines-lab/tinker-cookbook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_store.checkpoint.files import (
    WEIGHTS_FILE,
    CheckpointLimits,
    RegularFile,
    check_source_bytes,
)
from adapter_store.checkpoint.formats.select import find_weight_files
from adapter_store.checkpoint.module_patterns import OUTPUT_LAYER
from adapter_store.checkpoint.peft_config import AdapterConfig
from adapter_store.checkpoint.peft_extras import check_vectors, refused
from adapter_store.checkpoint.safetensors import TensorRecord, read_header
from adapter_store.core import SegmentKind, TargetKind
from adapter_store.errors import InvalidAdapter

PREFIX = "base_model.model."
DEFAULT_ADAPTER_NAME = "default"

_NAMED = r"(?:\.(?P<adapter>[^.]{1,128}))?"
_LINEAR = re.compile(rf"(?P<module>.+)\.lora_(?P<side>[AB]){_NAMED}\.weight")
_BIAS = re.compile(rf"(?P<module>.+)\.lora_B{_NAMED}\.bias")
_MAGNITUDE = re.compile(
    r"(?P<module>.+)\.lora_magnitude_vector(?:\.(?P<adapter>(?!weight$)[^.]{1,128}))?(?:\.weight)?"
)
_EMBEDDING = re.compile(rf"(?P<module>.+)\.lora_embedding_(?P<side>[AB]){_NAMED}")
_PATTERNS = (
    (_LINEAR, TargetKind.LINEAR, None),
    (_EMBEDDING, TargetKind.EMBEDDING, None),
    (_BIAS, TargetKind.LINEAR, SegmentKind.BIAS),
    (_MAGNITUDE, None, SegmentKind.MAGNITUDE),
)
_MODULE = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_TINKER_HEADS = frozenset({"unembed_tokens", "model.unembed_tokens"})
_WRAPPED = re.compile(r"(?:model\.)?language_model\.(?P<inner>.+)")

_SIDES = (SegmentKind.A, SegmentKind.B)

_ADAPTED = (
    "a base weight, which PEFT saves beside an adapted embedding or head: `loadout strip IN OUT "
    "--model DIR` makes a copy without it; or save with save_embedding_layers=False"
)
_RESIZED = (
    "a base weight, which PEFT saves where tokens were added to the vocabulary: no adapter can "
    "have any of its own; where none were, `loadout strip IN OUT --model DIR` makes a copy "
    "without it"
)
_BASE_PARTS = {
    ".base_layer.": _ADAPTED,
    ".embed_tokens.weight.": _RESIZED,
    ".lm_head.weight.": _RESIZED,
}

# Tensors that trainers save besides A and B, and what to do about each.
_HINTS = (
    *_BASE_PARTS.items(),
    (".modules_to_save.", "modules_to_save is not supported"),
    (".bias", "a bias of the base model is not supported"),
)


@dataclass(frozen=True, slots=True)
class TensorKey:
    """A tensor's meaning: side A or B, or what else `side` says, of `target`, which the trained
    model calls `module`. `is_transposed`: A is [in, rank] and B is [rank, out]. No kind: the name
    does not tell."""

    target: str
    module: str
    kind: TargetKind | None
    side: SegmentKind
    adapter_name: str
    is_transposed: bool = False


def parse_key(key: str) -> TensorKey:
    """Parses a tensor's name.

    Raises InvalidAdapter TENSOR_UNKNOWN (subject: the name): the tensor would stay unused.
    """
    path = key.removeprefix(PREFIX).removeprefix(PREFIX)
    for pattern, kind, side in _PATTERNS:
        match = pattern.fullmatch(path)
        if match and is_module(match["module"]):
            side = side or SegmentKind(match["side"].lower())
            name = match["adapter"] or DEFAULT_ADAPTER_NAME
            return TensorKey(target_of(match["module"]), match["module"], kind, side, name)
    hint = next((hint for part, hint in _HINTS if part in f"{key}."), "")
    if not hint and ".lora_" not in key:
        hint = "its name ends with none of .lora_A.weight, .lora_B.weight, .lora_embedding_A and _B"
    raise InvalidAdapter(
        f"{key}: not a LoRA weight of a module" + (f" ({hint})" if hint else ""),
        subject=key,
        reason="TENSOR_UNKNOWN",
    )


def is_module(path: str) -> bool:
    """Returns whether part of a tensor's name can be the path of a module."""
    return _MODULE.fullmatch(path) is not None


def is_base_weight(key: str) -> bool:
    """Returns whether a tensor is a copy of one of the base model's, as PEFT names it."""
    if not key.startswith(PREFIX) or ".modules_to_save." in key or ".lora_" in key:
        return False
    return any(part in f".{key}." for part in _BASE_PARTS)


def target_of(module: str) -> str:
    """Returns the canonical target: the module's path in the language model alone, by the name that
    its Hugging Face model gives it."""
    name = recorded_name(module)
    return OUTPUT_LAYER if name in _TINKER_HEADS else name


def recorded_name(module: str) -> str:
    """Returns the name of the target in the digest: the module's path in the language model alone,
    as its trainer called it. Digests are for ever: what else trainers turn out to call a module
    goes to `target_of`."""
    if "language_model." not in module:
        return module
    wrapped = _WRAPPED.fullmatch(module)
    if wrapped is None:
        return module
    inner = wrapped["inner"]
    return inner if inner.startswith(("model.", "lm_head")) else f"model.{inner}"


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What an adapter changes in one target: delta = scale * B @ A.

    `a` is [rank, in] (an embedding's [rank, vocab]), `b` is [out, rank]; `is_transposed` means
    [in, rank] and [rank, out]. `module` is the target's name in the trained model, and so in the
    config. `alpha` is what the scale comes of; None where the config gives the scale itself.
    """

    name: str
    module: str
    kind: TargetKind
    rank: int
    alpha: float | None
    scale: float
    a: TensorRecord
    b: TensorRecord
    bias: TensorRecord | None = None
    magnitude: TensorRecord | None = None
    is_transposed: bool = False

    @property
    def kinds(self) -> frozenset[SegmentKind]:
        """What it needs a server to apply."""
        kinds = {SegmentKind.A, SegmentKind.B}
        if self.bias is not None:
            kinds.add(SegmentKind.BIAS)
        if self.magnitude is not None:
            kinds.add(SegmentKind.MAGNITUDE)
        return frozenset(kinds)

    def records(self) -> Iterator[tuple[str, TensorRecord]]:
        """Yields each saved tensor with its role in the digest."""
        prefix = "embedding_" if self.kind is TargetKind.EMBEDDING else ""
        suffix = "_transposed" if self.is_transposed else ""
        yield f"{prefix}A{suffix}", self.a
        yield f"{prefix}B{suffix}", self.b
        if self.bias is not None:
            yield "B_bias", self.bias
        if self.magnitude is not None:
            yield "magnitude", self.magnitude

    @property
    def in_features(self) -> int:
        """The number of input features; of an embedding, the size of the vocabulary."""
        return self.a.shape[0 if self.is_transposed else 1]

    @property
    def out_features(self) -> int:
        return self.b.shape[1 if self.is_transposed else 0]


def read_tensors(folder: Path, limits: CheckpointLimits) -> tuple[list[TensorRecord], int]:
    """Reads the headers of the weight files; returns all tensors in order of file and offset, and
    the size of the files.

    Raises InvalidAdapter as `find_weight_files` and `read_header`, and INDEX_MISMATCH;
    LimitExceeded for more than `limits.max_source_bytes`.
    """
    names, index = find_weight_files(folder, limits)
    records: list[TensorRecord] = []
    source_bytes = 0
    for name in names:
        with RegularFile(folder, name) as file:
            source_bytes += file.size_bytes
            check_source_bytes(source_bytes, limits)
            found = read_header(
                file.read_at,
                file.size_bytes,
                name,
                max_header_bytes=limits.max_header_bytes,
                max_tensors=limits.max_tensors - len(records),
            )
        if index is not None:
            _check_index(found, index)
        records += found
    missing = sorted(set(index or ()) - {record.key for record in records})
    if missing:
        raise InvalidAdapter(
            f"{missing[0]} is in the index but in no file",
            subject=missing[0],
            reason="INDEX_MISMATCH",
        )
    return records, source_bytes


def _check_index(records: Iterable[TensorRecord], index: Mapping[str, str]) -> None:
    """Raises InvalidAdapter unless each tensor is in the file that the index names."""
    for record in records:
        if index.get(record.key) != record.file:
            raise InvalidAdapter(
                f"{record.file}: {record.key} is not indexed in this file",
                subject=record.key,
                reason="INDEX_MISMATCH",
            )


def pair_targets(
    records: Iterable[TensorRecord],
    config: AdapterConfig,
    parse: Callable[[str], TensorKey] = parse_key,
) -> dict[str, TargetWeights]:
    """Returns the adapter's targets by name, sorted. `parse` reads the names of its format.

    Raises InvalidAdapter: TENSOR_UNKNOWN, TENSOR_DUPLICATE, ADAPTERS_MIXED, SHAPE_INVALID,
    PAIR_INCOMPLETE, TARGET_NOT_SELECTED, RANK_MISMATCH or NO_TARGETS; the subject is a tensor or
    the weights file.
    """
    pairs: dict[str, dict[SegmentKind, tuple[TensorKey, TensorRecord]]] = {}
    adapter_name = ""
    for record in records:
        key = parse(record.key)
        adapter_name = adapter_name or key.adapter_name
        if key.adapter_name != adapter_name:
            detail = f"of an adapter {key.adapter_name!r}, while others are of {adapter_name!r}"
            raise refused(record, "ADAPTERS_MIXED", detail)
        what, num_dimensions = ("matrix", 2) if key.side in _SIDES else ("vector", 1)
        if len(record.shape) != num_dimensions:
            raise refused(record, "SHAPE_INVALID", f"shape {list(record.shape)} is not a {what}")
        sides = pairs.setdefault(key.target, {})
        is_twice = key.side in sides or any(
            other.module != key.module or (other.kind or key.kind) != (key.kind or other.kind)
            for other, _ in sides.values()
        )
        if is_twice:
            raise refused(record, "TENSOR_DUPLICATE", f"{key.target} has another tensor for this")
        sides[key.side] = (key, record)
    if not pairs:
        raise InvalidAdapter(
            "the adapter changes nothing: it has no tensors",
            subject=WEIGHTS_FILE,
            reason="NO_TARGETS",
        )
    return {name: _target(name, pairs[name].values(), config) for name in sorted(pairs)}


def _target(
    name: str, sides: Iterable[tuple[TensorKey, TensorRecord]], config: AdapterConfig
) -> TargetWeights:
    by_side = {key.side: record for key, record in sides}
    for side in _SIDES:
        if side not in by_side:
            record = next(iter(by_side.values()))
            raise refused(record, "PAIR_INCOMPLETE", f"{name} has no {side.value.upper()} for it")
    key = next(key for key, _ in sides if key.kind is not None)
    module, kind, is_transposed = key.module, key.kind, key.is_transposed
    assert kind is not None
    a, b = by_side[SegmentKind.A], by_side[SegmentKind.B]
    if not config.selects(module, is_embedding=kind is TargetKind.EMBEDDING):
        raise refused(
            a, "TARGET_NOT_SELECTED", f"the config does not adapt {module}, so it would stay unused"
        )
    rank, alpha, scale = config.settings_for(module)
    of_a, of_b = (1, 0) if is_transposed else (0, 1)
    for record, found in ((a, a.shape[of_a]), (b, b.shape[of_b])):
        if found != rank:
            raise refused(
                record,
                "RANK_MISMATCH",
                f"shape {list(record.shape)} has rank {found}, the config says {rank}",
            )
    weights = TargetWeights(
        *(name, module, kind, rank, alpha, scale, a, b),
        *(by_side.get(SegmentKind.BIAS), by_side.get(SegmentKind.MAGNITUDE)),
        is_transposed=is_transposed,
    )
    check_vectors(*(config.extras, kind, a, weights.out_features, weights.bias, weights.magnitude))
    return weights
