"""The families of models that are read from GGUF files: the names of their tensors, and the values
that llama.cpp's converter changes.

https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py writes such files, and
`gguf-py/gguf/constants.py` there has the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD
from inference_svc.model.gguf.file import Header, shown

ARCHITECTURE = "general.architecture"
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
"""Tensors by their names in files. The factors divide rotary frequencies: config.json says them as
parameters, so that a model does not have the tensor."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one `general.architecture`.

    `blocks` has the modules of a layer by their names in files. If it `permutes`, rows of q and k
    have the halves of each head interleaved, since llama.cpp rotates neighbours. If it
    `adds_one`, weights of norms are one more than the checkpoint's.
    """

    architecture: str
    model_type: str
    blocks: Mapping[str, str]
    permutes: bool = False
    adds_one: bool = False

    def module_of(self, stored_name: str) -> str:
        """Returns the path of the module that has a tensor, "" for an unknown name."""
        if stored_name in _WHOLE:
            return _WHOLE[stored_name]
        found = _BLOCK.fullmatch(stored_name)
        if found is None or found["part"] not in self.blocks:
            return ""
        return f"model.layers.{found['layer']}.{self.blocks[found['part']]}"


_BLOCK = re.compile(r"blk\.(?P<layer>0|[1-9][0-9]{0,4})\.(?P<part>[a-z_]+)\.(?:weight|bias)")
_WHOLE = {EMBEDDING: EMBED_TOKENS, "output_norm.weight": "model.norm", HEAD: LM_HEAD}
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_OF_BOTH_SIDES = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_COMMON = {**_PROJECTIONS, **_PRE_NORMS}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", _COMMON, permutes=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _COMMON),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", {**_COMMON, **_HEAD_NORMS}),
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2", {**_PROJECTIONS, **_NORMS_OF_BOTH_SIDES}, adds_one=True
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_PROJECTIONS, **_NORMS_OF_BOTH_SIDES, **_HEAD_NORMS},
        adds_one=True,
    ),
}
"""By `general.architecture`."""


def family_of(header: Header) -> Family:
    """Returns the family of a file's model. Raises UnsupportedModel for another architecture, and
    for a file that is a part of a model, or no language model."""
    metadata = header.metadata
    if metadata.get("general.type", "model") != "model":
        raise header.unsupported("general.type", "only a model can be served")
    parts = metadata.get("split.count", 0)
    if type(parts) is not int or parts > 1:
        raise header.unsupported(
            "split.count", "it is a part of a model: join the parts with llama-gguf-split --merge"
        )
    found = metadata.get(ARCHITECTURE)
    if not isinstance(found, str) or found not in FAMILIES:
        raise header.unsupported(
            ARCHITECTURE,
            f"supported in GGUF files are {', '.join(FAMILIES)}; serve the model's safetensors",
        )
    family = FAMILIES[found]
    unknown = [
        shown(each.name)
        for each in header.tensors
        if each.name != ROPE_FACTORS and not family.module_of(each.name)
    ]
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise UnsupportedModel(
            f"{header.path}: tensors that are not known for {ARCHITECTURE} = {found!r}: "
            f"{', '.join(unknown[:5])}{more}; serve the model's safetensors"
        )
    return family
