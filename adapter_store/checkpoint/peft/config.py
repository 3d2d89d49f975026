"""An adapter's config as one typed object: which modules, at which rank and scale. Reads PEFT's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from adapter_store.checkpoint.peft.config_values import (
    invalid_value,
    read_flag,
    read_names,
    read_number,
    read_rank,
    read_text,
)
from adapter_store.checkpoint.peft.extras import NO_EXTRAS, Extras, read_extras
from adapter_store.checkpoint.peft.fields import check_fields
from adapter_store.checkpoint.peft.module_patterns import (
    MatchBudget,
    ModuleMatcher,
    NumberT,
    PatternTable,
)
from adapter_store.checkpoint.peft.tensor_keys import trained_name
from adapter_store.checkpoint.reading.files import CheckpointLimits
from contract.adapter_files import CONFIG_FILE, MLX_WEIGHTS_FILE

DEFAULT_RANK = 8
DEFAULT_ALPHA = 8


class ModuleSettings(NamedTuple):
    """The rank, alpha and scale that a config gives to one module. No alpha: the config gives the
    scale itself."""

    rank: int
    alpha: float | None
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of a config that change the maths, and how to apply them.

    They are PEFT's LoraConfig's. Of a trainer that gives no alpha, `scale` multiplies B @ A, and
    alpha and its pattern are not used; `last_layers` is how many layers it adapts, 0 if it does not
    say. `extras` are its contents besides A and B. `base_model` is "" when the file does not name
    one; it may be a trainer's local path, see `names_local_path`. `ignored_keys` are unknown keys
    that the operator lets pass, sorted. The methods raise InvalidAdapter PATTERN_TOO_SLOW when the
    seconds for matching this adapter's patterns are used up.
    """

    base_model: str
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    modules: ModuleMatcher
    ignored_keys: tuple[str, ...] = ()
    scale: float | None = None
    last_layers: int = 0
    extras: Extras = NO_EXTRAS

    def selects(self, module: str, *, is_embedding: bool) -> bool:
        """Returns whether PEFT would adapt the module, wrapped by torch before or afterwards."""
        return any(
            self.modules.selects(name, is_embedding=is_embedding)
            for name in dict.fromkeys((module, trained_name(module)))
        )

    def settings_for(self, module: str) -> ModuleSettings:
        """Applies the patterns. The scale is alpha / r, or alpha / sqrt(r) for rank-stabilised
        LoRA (arXiv 2312.03732)."""
        rank = _lookup(self.rank_pattern, module, self.rank)
        if self.scale is not None:
            return ModuleSettings(rank, None, self.scale)
        alpha = _lookup(self.alpha_pattern, module, self.alpha)
        return ModuleSettings(rank, alpha, alpha / (math.sqrt(rank) if self.use_rslora else rank))


def _lookup(table: PatternTable[NumberT], module: str, default: NumberT) -> NumberT:
    """Returns the value for a module, whose name may have the parts of torch's wrappers."""
    inner = trained_name(module)
    if inner != module:
        default = table.lookup(inner, default)
    return table.lookup(module, default)


def parse_config(fields: Mapping[str, Any], limits: CheckpointLimits) -> AdapterConfig:
    """Checks the parsed content of the file.

    Raises InvalidAdapter: a key's value is not usable or not supported (subject: the key).
    """
    peft_type = fields.get("peft_type")
    if peft_type != "LORA":
        why = "only LORA is supported"
        if peft_type is None:
            why += "; a config that PEFT saves has this key: is this another tool's file?"
        if "lora_parameters" in fields:
            why += f"; MLX-LM's config, which this is, belongs to {MLX_WEIGHTS_FILE}"
        raise invalid_value("peft_type", peft_type, why, "CONFIG_UNSUPPORTED")
    ignored_keys = check_fields(fields, CONFIG_FILE, limits.allowed_config_keys)
    budget = MatchBudget(limits.max_match_seconds)
    return AdapterConfig(
        base_model=read_text(fields, "base_model_name_or_path"),
        rank=read_rank("r", fields.get("r", DEFAULT_RANK), limits),
        alpha=read_number("lora_alpha", fields.get("lora_alpha", DEFAULT_ALPHA), "alpha"),
        use_rslora=read_flag(fields, "use_rslora"),
        rank_pattern=PatternTable(
            "rank_pattern",
            {
                pattern: read_rank("rank_pattern", rank, limits)
                for pattern, rank in _mapping(fields, "rank_pattern").items()
            },
            budget,
        ),
        alpha_pattern=PatternTable(
            "alpha_pattern",
            {
                pattern: read_number("alpha_pattern", alpha, "alpha")
                for pattern, alpha in _mapping(fields, "alpha_pattern").items()
            },
            budget,
        ),
        modules=_modules(fields, budget),
        ignored_keys=ignored_keys,
        extras=read_extras(fields),
    )


def _modules(fields: Mapping[str, Any], budget: MatchBudget) -> ModuleMatcher:
    target_modules = read_names(fields, "target_modules")
    if not target_modules and not fields.get("target_parameters"):
        raise invalid_value(
            "target_modules", fields.get("target_modules"), "the adapted modules must be named"
        )
    layers = _layers(fields.get("layers_to_transform"))
    patterns = read_names(fields, "layers_pattern")
    if isinstance(patterns, str):
        patterns = (patterns,) if patterns else ()
    # PEFT refuses both combinations, so their meaning is undefined.
    if isinstance(target_modules, str) and (layers is not None or patterns):
        key = "layers_pattern" if layers is None else "layers_to_transform"
        raise invalid_value(key, fields[key], "it needs target_modules to be a list")
    if patterns and layers is None:
        raise invalid_value(
            "layers_pattern", fields["layers_pattern"], "it needs layers_to_transform"
        )
    exclude_modules = read_names(fields, "exclude_modules")
    return ModuleMatcher(target_modules, exclude_modules, layers or (), patterns, budget)


def _mapping(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = fields.get(key)
    if value is not None and not isinstance(value, dict):
        raise invalid_value(key, value, "not a map of patterns")
    return value or {}


def _layers(value: Any) -> tuple[int, ...] | None:
    indices = [value] if type(value) is int else value
    if indices is None:
        return None
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise invalid_value("layers_to_transform", value, "not an index or a list of indices")
    return tuple(indices)
