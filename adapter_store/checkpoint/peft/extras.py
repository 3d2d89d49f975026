"""The contents besides A and B that a PEFT config announces, and whether the adapter has just
these.

    lora_bias    B has a bias, which is scaled as B is
    use_dora     a module's weights with B @ A get the norms that `lora_magnitude_vector` has
    target_parameters
                 parameters have A and B; see adapter_store.checkpoint.peft.parameters
    alora_invocation_tokens
                 it is active from the first of these on, where all of them follow one another in
                 the prompt for the last time; before, and in a prompt without them, the base is
    modules_to_save, bias, trainable_token_indices
                 weights of the base are replaced; see adapter_store.checkpoint.replacements
    ensure_weight_tying
                 head and embedding have one change, if the base has one weight for both. PEFT then
                 names only the embedding in the config, and saves the change of each

Contents that the config does not announce would stay unused where PEFT loads the adapter, and
announced contents that the file does not have were lost on the way: both are refused by name.

Sources: peft/tuners/lora/{config,layer,dora}.py of PEFT 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapter_store.checkpoint.peft.config_values import invalid_value, read_flag, read_names
from adapter_store.checkpoint.peft.module_patterns import path_tails
from adapter_store.checkpoint.peft.tensor_keys import TensorKey
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.checkpoint.weights import ParameterOrder
from adapter_store.errors import InvalidAdapter
from contract.images.targets import TargetKind

CLASSIFIERS = frozenset({"classifier", "score"})
"""Modules that PEFT adds to modules_to_save of classifiers by itself, whichever the model has."""
INPUTS = "embed_tokens"
EMBEDDINGS = frozenset({INPUTS, "lm_head"})
"""Modules that PEFT knows as the vocabulary's."""
MAX_TOKEN_ID = (1 << 31) - 1
MAX_INVOCATION_TOKENS = 1024
_VERSION = re.compile(
    r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?P<more>[A-Za-z.+@-][\w.+@-]{0,100})?", re.ASCII
)
_LAST_FIRST, _FIRST_OUTPUTS, _FIRST_INPUTS = (0, 18, 0), (0, 19, 0), (0, 19, 1)
"""Releases of PEFT: see adapter_store.checkpoint.peft.parameters."""


@dataclass(frozen=True, slots=True)
class Extras:
    """The contents besides A and B that PEFT's config announces, by the names of its fields."""

    lora_bias: bool = False
    use_dora: bool = False
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The rows that are trained, in the file's order, by the ends of modules' names; "" is the
    input embedding, which the config need not name."""

    parameters: tuple[str, ...] = ()
    """Ends of the paths of parameters, with their own names."""
    parameter_order: ParameterOrder | None = None
    """The features of A of a parameter in files of the PEFT that saved this one; None: not
    known."""
    invocation_tokens: tuple[int, ...] = ()
    fan_in_fan_out: bool = False
    """Linear layers of the base have their weights as [in, out]."""
    ties_embeddings: bool = False
    """Of embedding and head, if the base ties them, both have the change that either has."""

    def parameters_of(self, module: str) -> list[str]:
        """Returns the names of a module's parameters that have A and B, if it has them, sorted."""
        names = {entry.rpartition(".")[2] for entry in self.entries_of_parameters(module)}
        return sorted(names)

    def entries_of_parameters(self, module: str) -> frozenset[str]:
        """Returns the entries of target_parameters that name parameters of a module."""
        tails = {"", *path_tails(module)}
        return frozenset(entry for entry in self.parameters if entry.rpartition(".")[0] in tails)

    def check_parameters(self, used: Collection[str]) -> None:
        """Raises InvalidAdapter TENSOR_MISSING unless all of target_parameters are used."""
        for entry in self.parameters:
            if entry not in used:
                raise invalid_value(
                    "target_parameters",
                    entry,
                    "the file has no A and B for it",
                    "TENSOR_MISSING",
                )

    @property
    def saves_tied(self) -> bool:
        """Whether embedding and head have one saved weight, if the base ties them."""
        names = {entry.rpartition(".")[2] for entry in self.modules_to_save}
        return self.ties_embeddings and not EMBEDDINGS.isdisjoint(names)

    def entries_of(self, module: str) -> frozenset[str]:
        """Returns the entries of modules_to_save that save this module, or a module that it is part
        of: PEFT looks at how names end, not at their components."""
        parts = module.split(".")
        paths = [".".join(parts[: count + 1]) for count in range(len(parts))]
        return frozenset(
            entry for entry in self.modules_to_save if any(path.endswith(entry) for path in paths)
        )


NO_EXTRAS = Extras()


def read_extras(fields: Mapping[str, Any]) -> Extras:
    """Reads a config's fields. Raises InvalidAdapter with a key as its subject."""
    lora_bias, use_dora = read_flag(fields, "lora_bias"), read_flag(fields, "use_dora")
    if lora_bias and use_dora:
        raise invalid_value(
            "lora_bias",
            True,
            "PEFT does not support it with use_dora; train without one",
            "CONFIG_UNSUPPORTED",
        )
    return Extras(
        lora_bias,
        use_dora,
        bias=_read_bias(fields),
        modules_to_save=_read_modules_to_save(fields),
        token_ids=_read_token_ids(fields),
        parameters=_read_parameters(fields),
        parameter_order=_read_order(fields),
        invocation_tokens=_read_invocation_tokens(fields),
        fan_in_fan_out=read_flag(fields, "fan_in_fan_out"),
        ties_embeddings=read_flag(fields, "ensure_weight_tying"),
    )


def _read_bias(fields: Mapping[str, Any]) -> str:
    value = fields.get("bias") or "none"
    if value not in ("none", "all", "lora_only"):
        raise invalid_value("bias", value, "not none, all or lora_only")
    return str(value)


def _read_modules_to_save(fields: Mapping[str, Any]) -> tuple[str, ...]:
    names = read_names(fields, "modules_to_save")
    if isinstance(names, str) and names:  # PEFT would look for its letters
        raise invalid_value("modules_to_save", names, "not a list of names")
    return tuple(dict.fromkeys(names))


def _read_parameters(fields: Mapping[str, Any]) -> tuple[str, ...]:
    key = "target_parameters"
    names = read_names(fields, key)
    if isinstance(names, str) and names:
        raise invalid_value(key, names, "not a list of names")
    for others in ("lora_bias", "use_dora"):
        if names and fields.get(others):
            raise invalid_value(
                key,
                list(names),
                f"PEFT has no {others} of parameters; train without one",
                "CONFIG_UNSUPPORTED",
            )
    return tuple(dict.fromkeys(names))


def _read_invocation_tokens(fields: Mapping[str, Any]) -> tuple[int, ...]:
    key = "alora_invocation_tokens"
    value = fields.get(key) or []
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise invalid_value(key, value, "not a list of token ids")
    if len(value) > MAX_INVOCATION_TOKENS:
        raise invalid_value(key, value, f"more than {MAX_INVOCATION_TOKENS} tokens")
    if value and (min(value) < 0 or max(value) > MAX_TOKEN_ID):
        raise invalid_value(key, value, f"a token id is from 0 to {MAX_TOKEN_ID}")
    for other in (
        *("use_dora", "target_parameters", "modules_to_save", "trainable_token_indices", "bias"),
    ):
        if value and fields.get(other) not in (None, False, "none", [], {}):
            raise invalid_value(
                key,
                value,
                f"{other} is also active before these tokens: train without one of the two",
                "CONFIG_UNSUPPORTED",
            )
    return tuple(value)


def _read_order(fields: Mapping[str, Any]) -> ParameterOrder | None:
    """Returns the features of A of a parameter, by the version of PEFT in the config."""
    version = fields.get("peft_version")
    found = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if found is None:
        return None
    numbers = tuple(int(number or 0) for number in found.groups()[:3])
    # Commits between these releases say the next one's number, whichever way they have it.
    if found["more"] and _LAST_FIRST < numbers <= _FIRST_INPUTS:
        return None
    if numbers >= _FIRST_INPUTS:
        return ParameterOrder.INPUTS
    return ParameterOrder.OUTPUTS if numbers >= _FIRST_OUTPUTS else ParameterOrder.FIRST


def _read_token_ids(fields: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    key = "trainable_token_indices"
    value = fields.get(key) or {}
    lists = value if isinstance(value, dict) else {"": value}
    for module, ids in lists.items():
        if not isinstance(ids, list) or not all(type(each) is int for each in ids) or not ids:
            raise invalid_value(key, value, "not a list of token ids, or one for each module")
        if not isinstance(value, list) and not module:
            raise invalid_value(key, value, "the name of a module is missing")
        if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
            raise invalid_value(key, value, f"a token id is from 0 to {MAX_TOKEN_ID}")
        if len(set(ids)) < len(ids):
            raise invalid_value(key, value, "a token has two rows")
    return {module: tuple(ids) for module, ids in lists.items()}


def check_vectors(
    extras: Extras,
    kind: TargetKind,
    a: TensorRecord,
    out_features: int,
    bias: TensorRecord | None,
    magnitude: TensorRecord | None,
) -> None:
    """Checks that a target, with this A and as many outputs, has the vectors that the config says.

    Raises InvalidAdapter TENSOR_UNKNOWN, PAIR_INCOMPLETE or SHAPE_INVALID, with a tensor as its
    subject, or CONFIG_UNSUPPORTED.
    """
    if extras.lora_bias and kind is TargetKind.EMBEDDING:
        raise invalid_value(
            "lora_bias",
            True,
            f"{a.key}: PEFT has no bias of an embedding's B",
            "CONFIG_UNSUPPORTED",
        )
    for key, is_said, record in (
        ("lora_bias", extras.lora_bias, bias),
        ("use_dora", extras.use_dora, magnitude),
    ):
        if record is None:
            if is_said:
                what = "lora_B.bias" if key == "lora_bias" else "lora_magnitude_vector"
                raise refused(
                    a,
                    "PAIR_INCOMPLETE",
                    f"there is no {what} for it, although the config has {key}",
                )
        elif not is_said:
            raise refused(
                record, "TENSOR_UNKNOWN", f"it would stay unused, without {key} in the config"
            )
        elif record.shape != (out_features,):
            raise refused(
                record,
                "SHAPE_INVALID",
                f"shape {list(record.shape)} does not match {out_features} outputs",
            )


def convolution_hint(key: TensorKey, record: TensorRecord, config_key: str) -> str:
    """Returns the rest of the message about a tensor of three or more dimensions, which a
    convolution has; `config_key` selected its module."""
    if len(record.shape) < 3:
        return ""
    name = key.module.rpartition(".")[2]
    return f": changes of convolutions are not supported, train without {name} in {config_key}"


def refused(record: TensorRecord, reason: str, detail: str) -> InvalidAdapter:
    """Returns the error for a tensor."""
    return InvalidAdapter(f"{record.key}: {detail}", subject=record.key, reason=reason)
