"""The names that trainers give an adapter's tensors.

The names of PEFT, and of all who write its files:

    base_model.model.<module>.lora_A.weight            [rank, in]
    base_model.model.<module>.lora_B.weight            [out, rank]
    base_model.model.<module>.lora_embedding_A         [rank, vocab]
    base_model.model.<module>.lora_embedding_B         [hidden, rank]
    base_model.model.<module>.lora_B.bias              [out]
    base_model.model.<module>.lora_magnitude_vector    [out]; of an embedding [hidden]

`<module>` is the module's path in the model that was trained, "model.layers.0.self_attn.q_proj";
the config's patterns match it. An adapter saved from a whole state dict has its own name in
between: `lora_A.<name>.weight`. A module that was adapted twice has the prefix twice. A model with
more than text has its language model inside: `language_model.model.layers.0` (older transformers),
`model.language_model.layers.0` (newer); the target is the path in the language model alone. A
trainer that saves the model's own names leaves the prefix out: without it the rest is the module's
path all the same. The names of targets leave out the parts that torch's wrappers put in, at any
place (`_orig_mod.` of torch.compile). Tinker calls the head `model.unembed_tokens` or
`model.lm_head`, and MLX-LM the experts of a mixture `switch_mlp` or `switch_glu`.

A and B of all experts of a mixture in one tensor each: see adapter_store.checkpoint.peft.experts.

For the base's own weights, see adapter_store.checkpoint.replacements.

Sources: peft/utils/save_and_load.py `get_peft_model_state_dict` of PEFT 0.21;
tinker_cookbook/weights/_merge_utils.py of github.com/thinking-machines-lab/tinker-cookbook, and its
issue 928.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from adapter_store.checkpoint.peft.module_patterns import OUTPUT_LAYER
from adapter_store.checkpoint.peft.towers import advice_on_parts, tower_of
from adapter_store.errors import InvalidAdapter
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind
from contract.tensor_names import unwrapped

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
_SIDES = {"A": SegmentKind.A, "B": SegmentKind.B}
_ROWS = re.compile(rf"(?P<module>.+)\.token_adapter\.trainable_tokens_delta{_NAMED}")
_WHOLE = re.compile(
    rf"(?P<module>.+?)(?:\.(?P<place>base_layer|modules_to_save){_NAMED})?\.(?P<what>weight|bias)"
)
_NO_MODULE = re.compile(
    r"(.+\.)?(lora_[^.]*|base_layer|modules_to_save|original_module|token_adapter)(\..+)?"
)
"""Paths with components that PEFT puts into a model."""
_NAMED_TWICE = re.compile(r".+\.(lora_[AB]|lora_embedding_[AB])(\.[^.]+){2,}?(\.weight|\.bias)?")
_MODULE = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_TINKER_HEADS = frozenset({"unembed_tokens", "model.unembed_tokens", f"model.{OUTPUT_LAYER}"})
_SWITCH = re.compile(r"(?P<before>(?:.+\.)?)switch_(?:mlp|glu)\.(?P<projection>[^.]+)")
_WRAPPED = re.compile(r"(?:model\.)?language_model\.(?P<inner>.+)")

_BASE_PARTS = (".base_layer.", ".embed_tokens.weight.", ".lm_head.weight.")

_SAVED_ALONG = "where tokens were added, save with save_embedding_layers=False"
# Tensors that may lie beside A and B, and a remedy for each.
_HINTS = (
    (
        ".original_module.",
        f"the base's own, next to the copy that modules_to_save trains: {_SAVED_ALONG}",
    ),
    (".modules_to_save.", "parts of a saved module are named without it, as PEFT saves them"),
    (".token_adapter.", f"the base's own, next to trained rows: {_SAVED_ALONG}"),
)


@dataclass(frozen=True, slots=True)
class TensorKey:
    """A tensor's meaning: side A or B, or another that `side` names, of `target`, which the trained
    model calls `module`. `is_transposed`: A is [in, rank] and B is [rank, out]. No kind: the name
    does not tell; no name of an adapter: any. Of a base weight, `place` is the part that PEFT put
    into the model where it lies, and `module` ends with ".bias" if `is_bias`."""

    target: str
    module: str
    kind: TargetKind | None
    side: SegmentKind
    adapter_name: str
    is_transposed: bool = False
    place: str = ""
    is_bias: bool = False


def parse_key(key: str) -> TensorKey:
    """Parses a tensor's name.

    Raises InvalidAdapter TENSOR_UNKNOWN (subject: the name): the tensor would stay unused.
    """
    path = trained_name(_path_of(key))
    # First with the parts of wrappers, which digests have in the names of modules.
    found = _parse(_path_of(key)) or _parse(path)
    if found is not None:
        return found
    hint = next((hint for part, hint in _HINTS if part in f"{key}."), "")
    if not hint and (tower := tower_of(path)):
        hint = advice_on_parts(tower)
    if not hint and _NAMED_TWICE.fullmatch(path):
        hint = "after lora_A or lora_B it has more than the name of one adapter: save the adapter "
        hint += "alone, with PEFT's save_pretrained"
    if not hint and ".lora_" not in key:
        hint = "its name ends with none of .lora_A.weight, .lora_B.weight, .lora_embedding_A and _B"
        hint += ", and with neither .weight nor .bias"
        if module := path.rpartition(".")[0].rpartition(".")[2]:
            hint += f": if modules_to_save has {module}, train its linear layers alone, by their "
            hint += "names in target_modules or modules_to_save"
    raise InvalidAdapter(
        f"{key}: not a LoRA weight of a module" + (f" ({hint})" if hint else ""),
        subject=key,
        reason="TENSOR_UNKNOWN",
    )


def _path_of(key: str) -> str:
    """Returns a name without PEFT's prefix."""
    return key.removeprefix(PREFIX).removeprefix(PREFIX)


def _parse(path: str) -> TensorKey | None:
    """Returns the meaning of a name without its prefix; None if it has none."""
    for pattern, kind, side in _PATTERNS:
        match = pattern.fullmatch(path)
        if match and is_module(match["module"]):
            module, name = match["module"], match["adapter"] or DEFAULT_ADAPTER_NAME
            return TensorKey(target_of(module), module, kind, side or _SIDES[match["side"]], name)
    match = _ROWS.fullmatch(path)
    if match and is_module(match["module"]):
        module, name = match["module"], match["adapter"] or DEFAULT_ADAPTER_NAME
        return TensorKey(target_of(module), module, None, SegmentKind.ROWS, name)
    match = _WHOLE.fullmatch(path)
    if match and is_module(match["module"]) and not _NO_MODULE.fullmatch(match["module"]):
        return _whole(match)
    return None


def _whole(match: re.Match[str]) -> TensorKey:
    """Returns the meaning of a base weight."""
    module, place, name = match["module"], match["place"] or "", match["adapter"] or ""
    if match["what"] == "weight":
        return TensorKey(target_of(module), module, None, SegmentKind.FULL, name, place=place)
    return TensorKey(
        f"{target_of(module)}.bias",
        f"{module}.bias",
        TargetKind.VECTOR,
        SegmentKind.FULL,
        name,
        place=place,
        is_bias=True,
    )


def is_module(path: str) -> bool:
    """Returns whether part of a tensor's name can be the path of a module."""
    return _MODULE.fullmatch(path) is not None


def is_base_weight(key: str) -> bool:
    """Returns whether a tensor is a copy of one of the base model's, as PEFT names it."""
    key = unwrapped(key)
    if not key.startswith(PREFIX) or ".modules_to_save." in key or ".lora_" in key:
        return False
    return any(part in f".{key}." for part in _BASE_PARTS)


def target_of(module: str) -> str:
    """Returns the canonical target: the module's path in the language model alone, by the name that
    its Hugging Face model gives it."""
    name = recorded_name(trained_name(module))
    if "switch_" in name and (match := _SWITCH.fullmatch(name)):
        return f"{match['before']}experts.{match['projection']}"
    return OUTPUT_LAYER if name in _TINKER_HEADS else name


def trained_name(module: str) -> str:
    """Returns a module's name without the parts of torch's wrappers, and without a prefix of PEFT's
    that follows them."""
    inner = unwrapped(module)
    return module if inner == module else _path_of(inner)


def recorded_name(module: str) -> str:
    """Returns the name of the target in the digest: the module's path in the language model alone,
    as its trainer called it. Digests are for ever: further names by which trainers turn out to call
    a module belong in `target_of`."""
    if "language_model." not in module:
        return module
    wrapped = _WRAPPED.fullmatch(module)
    if wrapped is None:
        return module
    inner = wrapped["inner"]
    return inner if inner.startswith(("model.", "lm_head")) else f"model.{inner}"
