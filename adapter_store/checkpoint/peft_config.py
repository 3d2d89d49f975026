"""Parses `adapter_config.json` into one typed object: which modules, at which rank and scale."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adapter_store.checkpoint.files import CONFIG_FILE, CheckpointLimits, read_capped
from adapter_store.checkpoint.json import parse_object, show
from adapter_store.checkpoint.module_patterns import MatchBudget, ModuleMatcher, PatternTable
from adapter_store.checkpoint.peft_fields import check_fields
from adapter_store.errors import InvalidAdapter

_LOCAL_PATH = re.compile(r"[/~\\]|\.{1,2}([/\\]|$)|[A-Za-z]:[/\\]|file:|.*\\")

DEFAULT_RANK = 8
DEFAULT_ALPHA = 8


class ModuleSettings(NamedTuple):
    """The rank, alpha and scale that a config gives to one module."""

    rank: int
    alpha: float
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of a PEFT LoraConfig that change the maths, and how to apply them.

    `base_model` is "" when the file does not name one; it may be a trainer's local path, see
    `names_local_path`. `ignored_keys` are unknown keys that the operator lets pass, sorted. The
    methods raise InvalidAdapter PATTERN_TOO_SLOW when the seconds for matching this adapter's
    patterns are used up.
    """

    base_model: str
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    modules: ModuleMatcher
    ignored_keys: tuple[str, ...] = ()

    def selects(self, module: str, *, is_embedding: bool) -> bool:
        """Returns whether PEFT would adapt the module."""
        return self.modules.selects(module, is_embedding=is_embedding)

    def settings_for(self, module: str) -> ModuleSettings:
        """Applies the patterns. The scale is alpha / r, or alpha / sqrt(r) for rank-stabilised
        LoRA (arXiv 2312.03732)."""
        rank = self.rank_pattern.lookup(module, self.rank)
        alpha = self.alpha_pattern.lookup(module, self.alpha)
        return ModuleSettings(rank, alpha, alpha / (math.sqrt(rank) if self.use_rslora else rank))


def names_local_path(base_model: str) -> bool:
    """Returns whether a base model's name is a path on some trainer's machine: no hub and no
    operator names a model like this, and here it has no meaning."""
    return _LOCAL_PATH.match(base_model) is not None or base_model.count("/") > 1


def read_config(folder: Path, limits: CheckpointLimits) -> AdapterConfig:
    """Reads and checks `adapter_config.json`.

    Raises:
        InvalidAdapter: the file is missing or not one JSON object (subject: the file), or a key's
            value is not usable or not supported (subject: the key).
    """
    data = read_capped(folder, CONFIG_FILE, limits.max_config_bytes)
    return parse_config(parse_object(data, CONFIG_FILE), limits)


def parse_config(fields: Mapping[str, Any], limits: CheckpointLimits) -> AdapterConfig:
    """Checks the parsed content of the file. Raises as `read_config`."""
    peft_type = fields.get("peft_type")
    if peft_type != "LORA":
        raise _invalid("peft_type", peft_type, "only LORA is supported", "CONFIG_UNSUPPORTED")
    ignored_keys = check_fields(fields, CONFIG_FILE, limits.allowed_config_keys)
    _flag(fields, "fan_in_fan_out")
    budget = MatchBudget(limits.max_match_seconds)
    return AdapterConfig(
        base_model=_text(fields, "base_model_name_or_path"),
        rank=_rank("r", fields.get("r", DEFAULT_RANK), limits),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha", DEFAULT_ALPHA)),
        use_rslora=_flag(fields, "use_rslora"),
        rank_pattern=PatternTable(
            "rank_pattern",
            {
                pattern: _rank("rank_pattern", rank, limits)
                for pattern, rank in _mapping(fields, "rank_pattern").items()
            },
            budget,
        ),
        alpha_pattern=PatternTable(
            "alpha_pattern",
            {
                pattern: _alpha("alpha_pattern", alpha)
                for pattern, alpha in _mapping(fields, "alpha_pattern").items()
            },
            budget,
        ),
        modules=_modules(fields, budget),
        ignored_keys=ignored_keys,
    )


def _modules(fields: Mapping[str, Any], budget: MatchBudget) -> ModuleMatcher:
    target_modules = _names(fields, "target_modules")
    if not target_modules:
        raise _invalid(
            "target_modules", fields.get("target_modules"), "the adapted modules must be named"
        )
    layers = _layers(fields.get("layers_to_transform"))
    patterns = _names(fields, "layers_pattern")
    if isinstance(patterns, str):
        patterns = (patterns,) if patterns else ()
    # PEFT refuses both combinations, so what they would mean is undefined.
    if isinstance(target_modules, str) and (layers is not None or patterns):
        key = "layers_pattern" if layers is None else "layers_to_transform"
        raise _invalid(key, fields[key], "it needs target_modules to be a list")
    if patterns and layers is None:
        raise _invalid("layers_pattern", fields["layers_pattern"], "it needs layers_to_transform")
    exclude_modules = _names(fields, "exclude_modules")
    return ModuleMatcher(target_modules, exclude_modules, layers or (), patterns, budget)


def _rank(key: str, value: Any, limits: CheckpointLimits) -> int:
    if type(value) is not int or value < 1:
        raise _invalid(key, value, "a rank is a positive integer")
    if value > limits.max_rank:
        raise _invalid(
            key, value, f"over this store's limit of {limits.max_rank}", "RANK_TOO_LARGE"
        )
    return value


def _alpha(key: str, value: Any) -> float:
    # An integer may be too large for a float; a float may be infinite (1e999).
    if type(value) not in (int, float) or not abs(value) <= 1e30:
        raise _invalid(key, value, "alpha is a finite number")
    return float(value)


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise _invalid(key, value, "not true or false")
    return bool(value)


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 1024 or not (value.isprintable()):
        raise _invalid(key, value, "not a printable string")
    return value


def _mapping(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = fields.get(key)
    if value is not None and not isinstance(value, dict):
        raise _invalid(key, value, "not a map of patterns")
    return value or {}


def _names(fields: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """Returns a pattern, or a list of names; () when absent."""
    value = fields.get(key)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise _invalid(key, value, "not a string or a list of names")
    return tuple(value)


def _layers(value: Any) -> tuple[int, ...] | None:
    indices = [value] if type(value) is int else value
    if indices is None:
        return None
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise _invalid("layers_to_transform", value, "not an index or a list of indices")
    return tuple(indices)


def _invalid(key: str, value: Any, detail: str, reason: str = "CONFIG_INVALID") -> InvalidAdapter:
    return InvalidAdapter(
        f"{CONFIG_FILE}: {key}={show(value)}: {detail}", subject=key, reason=reason
    )
