"""Modules that no server, or not every server, computes, and advice on them.

Of a model's other towers, which only servers that read images compute: PEFT adapts every module of
a name, and a list such as ["q_proj", "v_proj"] means the vision tower's, too, where it has modules
of these names.

Of other families, which have names of their own. Most are of code that their authors published
beside the weights, before transformers had the family: an adapter of one does not fit the newer
form, which has the same weights by other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from adapter_store.checkpoint.peft.module_patterns import OUTPUT_LAYER

_VISION = ("vision_tower", "vision_model", "visual", "embed_vision")
_CONNECTORS = ("multi_modal_projector", "connector")
_TOWERS = frozenset([*_VISION, *_CONNECTORS, "audio_tower", "embed_audio"])
"""Their names in transformers, and the names of modules that join them to the text's, below the
whole model."""
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FAMILIES = (
    (
        r"transformer\.encoder\.layers\.\d+\.(self_attention|mlp)\.(query_key_value|dense.*)",
        "ChatGLM, as of glm-4-9b-chat with its authors' code (glm-4-9b-chat-hf has the same "
        "weights for transformers' GLM)",
    ),
    (
        r"transformer\.h\.\d+\.(attn\.(c_attn|c_proj)|mlp\.(w1|w2|c_fc|c_proj))",
        "GPT-2, or of the first Qwen with its authors' code",
    ),
    (
        r"transformer\.h\.\d+\.(self_attention|mlp)\.(query_key_value|dense.*)",
        "Falcon or BLOOM",
    ),
    (r"gpt_neox\.layers\.\d+\..*", "GPT-NeoX or Pythia"),
    (r"model\.layers\.\d+\.self_attn\.W_pack", "Baichuan with its authors' code"),
    (
        r"model\.layers\.\d+\.(attention\.(wqkv|wo)|feed_forward\.w[123])",
        "InternLM2 with its authors' code",
    ),
)
"""Names of modules, and the family that has them."""
MAX_LISTED = 3
"""How many modules that no target is an error names."""
_PATTERNS = tuple((re.compile(names), family) for names, family in _FAMILIES)


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


def advice_on_parts(tower: str) -> str:
    """Returns the parts of a tower that adapters may change, and how to train one without the
    others."""
    return (
        f"of {tower} adapters may change linear layers and norms, with their biases, on servers "
        "that read images; train without its other parts in target_modules and modules_to_save"
    )


def describe_unknown(
    modules: Sequence[str], known: Iterable[str], targets: Iterable[str] = ()
) -> str:
    """Describes, with advice, modules that a base model has not, of an adapter that has modules of
    the `known` names, too. `targets` are the names of modules that a server computes."""
    num_more = len(modules) - MAX_LISTED
    more = f" and {num_more} more modules" if num_more > 0 else ""
    detail = f"has no {', '.join(modules[:MAX_LISTED])}{more}"
    towers = dict.fromkeys(filter(None, map(tower_of, modules)))
    computed = set(map(tower_of, targets)) if towers else set()
    if tower := next((each for each in towers if each in computed), ""):
        return f"{detail}: {advice_on_parts(tower)}"
    if towers:
        return f"{detail}: {advice(towers, known)}"
    family = next(filter(None, map(_other_family, modules)), "")
    return f"{detail}: {family}" if family else detail


def _other_family(module: str) -> str:
    """Returns advice on a module that no target is, if it has another family's name; else ""."""
    for names, family in _PATTERNS:
        if names.fullmatch(module):
            return f"these are names of {family}: train with the model that is served"
    return ""
