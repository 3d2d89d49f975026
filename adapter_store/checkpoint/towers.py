"""Modules of a model's towers beside the one for text, which no server computes.

PEFT adapts every module of a name: a list such as ["q_proj", "v_proj"] means the vision tower's,
too, where it has modules of these names.
"""

from __future__ import annotations

from collections.abc import Iterable

from adapter_store.checkpoint.module_patterns import OUTPUT_LAYER

_VISION = ("vision_tower", "vision_model", "visual", "embed_vision", "multi_modal_projector")
_TOWERS = frozenset([*_VISION, "audio_tower", "embed_audio"])
"""Their names in transformers, and the names of modules that join them to the text's, below the
whole model."""
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tower_of(module: str) -> str:
    """Returns the name of the other tower that has the module; "" if none has."""
    first = module.removeprefix("model.").partition(".")[0]
    return first if first in _TOWERS else ""


def advice(towers: Iterable[str], names: Iterable[str] = ()) -> str:
    """Returns how to train an adapter without modules of these towers, but of these `names` in the
    language model; none: of all its linear layers."""
    adapted = sorted({*names}) or _LINEAR
    inner = "|".join(name for name in adapted if name != OUTPUT_LAYER)
    expressions = [rf".*language_model\.(.*\.)?({inner})"] if inner else []
    if OUTPUT_LAYER in adapted:
        expressions.append(rf"(.*\.)?{OUTPUT_LAYER}")
    return (
        f"only the language model is served, without {', '.join(towers)}; a list of target_modules "
        "means modules of these names everywhere, so train with an expression in its place, "
        f'target_modules=r"{"|".join(expressions)}", and with no modules_to_save of another part'
    )
