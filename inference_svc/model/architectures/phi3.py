"""Phi 3 and 4: q, k and v in one tensor, gate and up in another; RoPE on a part of each head, with
one set of factors for short contexts and one for long contexts."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope, with_windows
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder

_KINDS = {"longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Their names in older files."""
_ORIGINAL = "original_max_position_embeddings"


def describe(config: ConfigReader) -> Decoder:
    # Counts even where it is left out; its value in the rotation's own parameters does not.
    original = {_ORIGINAL: config.get(_ORIGINAL)}
    turned = rope(config.with_values(**original), part=1.0, kinds=_KINDS)
    mixer = attention(config, turned, is_stored_fused=True)
    layer = block(config, mixer, dense(config, is_stored_fused=True))
    return decoder(config, with_windows(layer, config.same_window(config.window)))


FAMILIES = (
    Family(
        "Phi3ForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps sliding_window"),
        ignores=names("attention_bias auto_map"),  # we compare with transformers' own code
        accepts={"full_attn_mod": 1, "interpolate_factor": 1},
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            _ORIGINAL: 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
    ),
)
