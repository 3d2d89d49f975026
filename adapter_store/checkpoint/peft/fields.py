"""A verdict on every field of PEFT's LoraConfig: honoured, without effect here, or refused; and the
known keys of others.

The rule for `adapter_config.json`: a key that changes the maths is honoured, or refused by name and
value. A key that this table does not know is refused too, unless its value switches it off (null,
false, or empty), since a newer PEFT adds features as fields that are off by default; or unless the
operator says that it changes nothing.

Source: peft/tuners/lora/config.py and peft/config.py of PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from adapter_store.checkpoint.reading.json import show
from adapter_store.errors import InvalidAdapter

HONOURED = frozenset(
    {
        "peft_type",  # must be LORA
        "peft_version",  # provenance, but of square target_parameters
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_bias",
        "use_dora",
        "bias",
        "modules_to_save",
        "ensure_weight_tying",
        "trainable_token_indices",
        "target_parameters",
        "alora_invocation_tokens",
        "fan_in_fan_out",  # how base weights are stored: A and B have the same shapes either way
        "init_lora_weights",  # see INIT_ACCEPTED
    }
)

# Why a field does not change the computation from the saved A and B.
NO_EFFECT: Mapping[str, str] = {
    "task_type": "names the class of the base model",
    "auto_mapping": "names the class of the base model",
    "revision": "provenance of the base model",
    "inference_mode": "freezes parameters in training",
    "lora_dropout": "drops nothing at inference",
    "megatron_core": "used only with megatron_config",
    "qalora_group_size": "used only with use_qalora",
    "loftq_config": "used only with init_lora_weights=loftq",
    "eva_config": "used only while the adapter is initialised",
    "corda_config": "used only with init_lora_weights=corda",
    "lora_ga_config": "used only with init_lora_weights=lora_ga",
    "runtime_config": "PEFT ignores it in a file",
}


class Refusal(NamedTuple):
    """Why a field is accepted only when it is off, and the remedy."""

    why: str
    instead: str


_MERGE = "merge the adapter into the base model (merge_and_unload) and serve that"
_TRAIN_WITHOUT = "train without it"

REFUSED: Mapping[str, Refusal] = {
    "use_qalora": Refusal(
        "QALoRA pools the input before A", "train plain LoRA over the quantised base model"
    ),
    "use_bdlora": Refusal(
        "BD-LoRA keeps only the diagonal blocks of A or B", "save A and B as whole matrices"
    ),
    "layer_replication": Refusal(
        "it rebuilds the base model with repeated layers",
        "save the model with its repeated layers and adapt that",
    ),
    "megatron_config": Refusal(
        "it describes Megatron's parallel layers", "save the adapter gathered, without it"
    ),
    "velora_config": Refusal("VeLoRA stores tensors besides A and B", _TRAIN_WITHOUT),
    "monteclora_config": Refusal("MonteCLoRA samples its weights", _TRAIN_WITHOUT),
    "arrow_config": Refusal(
        "Arrow routes between several adapters", "register each adapter by itself"
    ),
    "kasa_config": Refusal("KaSA truncates the base weight", f"{_TRAIN_WITHOUT}, or {_MERGE}"),
}

SUBCONFIGS = frozenset(
    {"use_bdlora", "velora_config", "monteclora_config", "arrow_config", "kasa_config"}
)
"""Refused fields that PEFT takes as switched on, with all defaults, if they are an empty object."""

FORMER_REFUSED: Mapping[str, Refusal] = {
    "enable_lora": Refusal(
        "it adapts some of the outputs of a fused layer, with a B in groups (PEFT before 0.3)",
        "train with a newer PEFT",
    ),
}
"""Fields of former releases that change the maths."""

KNOWN = HONOURED | NO_EFFECT.keys() | REFUSED.keys() | FORMER_REFUSED.keys()
"""Fields with a verdict, which no operator changes."""

FOREIGN = (
    # The base's family; names and shapes of the weights decide instead. Cloudflare Workers AI asks
    # for it: developers.cloudflare.com/workers-ai, "Using LoRA adapters"
    "model_type",
    # Whether A and B were merged into the weights between training steps: PEFT before 0.3;
    # InternLM/lmdeploy#1151
    "merge_weights",
    # Where transformers took its settings for generation from: transformers' GenerationConfig;
    # huggingface/peft#1168
    "_from_model_config",
    # The release that saved it: transformers' PreTrainedConfig and GenerationConfig;
    # huggingface/peft#1168
    "transformers_version",
    # The model's place, for which we read base_model_name_or_path: transformers' PreTrainedConfig
    "_name_or_path",
)
"""Keys that hosts ask for, or other tools add. They change nothing."""

# Initialisations that leave the base weight unchanged, besides the original ones, true and false.
INIT_ACCEPTED = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_INIT_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_INIT_CHANGED = (
    "it changes the base weights, and the adapter only fits the changed weights. `loadout convert "
    "IN OUT` makes a plain LoRA of it. Pass --initial DIR, the adapter saved before training, or "
    "for pissa and olora --model DIR, the base model"
)
_INIT_UNKNOWN = (
    "unknown initialisation, which may change the base weights; save it with "
    "path_initial_model_for_weight_conversion to make a plain LoRA of it"
)


def check_fields(
    fields: Mapping[str, Any], subject: str, allowed: Container[str] | None = frozenset()
) -> tuple[str, ...]:
    """Refuses every field that is neither honoured nor without effect, nor unknown and `allowed`
    (None: all unknown ones are). Returns the keys that passed because they are allowed, sorted.

    `subject` names the file. Raises InvalidAdapter with the key as its subject: CONFIG_UNSUPPORTED
    (known to change the maths) or CONFIG_UNKNOWN.
    """
    for key, value in fields.items():
        refusal = REFUSED.get(key) or FORMER_REFUSED.get(key)
        if refusal is not None and not _is_off(key, value):
            raise InvalidAdapter(
                f"{subject}: {key}={show(value)} is not supported: {refusal.why}; "
                f"{refusal.instead}",
                subject=key,
                reason="CONFIG_UNSUPPORTED",
            )
    ignored = check_unknown(fields, KNOWN.union(FOREIGN), subject, allowed)
    _check_init(fields.get("init_lora_weights", True), subject)
    return tuple(ignored)


def check_unknown(
    fields: Mapping[str, Any],
    known: Container[str],
    subject: str,
    allowed: Container[str] | None = frozenset(),
) -> list[str]:
    """Refuses every field that is on, not `known` and not `allowed`; returns the others, sorted.
    Arguments are `check_fields`', and it raises the same errors."""
    ignored = []
    for key, value in fields.items():
        if key in known or _is_off(key, value):
            continue
        if allowed is not None and key not in allowed:
            raise InvalidAdapter(
                f"{subject}: unknown key {show(key)} with value {show(value)}; it may change the "
                "adapter's results. If you know that it does not, remove it from the file, or ask "
                "the store's operator to allow it with --allow-config-keys",
                subject=key if _is_presentable(key) else subject,
                reason="CONFIG_UNKNOWN",
            )
        ignored.append(key)
    return sorted(ignored)


def _is_presentable(key: str) -> bool:
    """Returns whether an untrusted key can be the subject of an error."""
    return 0 < len(key) <= 100 and key.isprintable()


def _is_off(key: str, value: Any) -> bool:
    if key in SUBCONFIGS and value == {}:
        return False
    return value is None or value is False or value in ("", [], {})


def changes_base(init: Any) -> bool:
    """Returns whether PEFT takes something out of the base weights with this init_lora_weights."""
    return isinstance(init, str) and init.lower().startswith(_INIT_CHANGES_BASE)


def _check_init(value: Any, subject: str) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str) and value.lower() in INIT_ACCEPTED:
        return
    detail = _INIT_CHANGED if changes_base(value) else _INIT_UNKNOWN
    raise InvalidAdapter(
        f"{subject}: init_lora_weights={show(value)} is not supported: {detail}",
        subject="init_lora_weights",
        reason="CONFIG_UNSUPPORTED",
    )
