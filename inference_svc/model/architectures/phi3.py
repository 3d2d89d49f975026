"""Phi 3 and 4: q, k and v in one tensor, gate and up in another; a part of each head is turned, by
factors for short contexts or for long ones."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope, with_windows
from inference_svc.model.config_keys import names
from inference_svc.model.config_reader import ConfigReader
from inference_svc.model.description import Decoder

_KINDS = {"longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""What older files call them."""


def describe(config: ConfigReader) -> Decoder:
    has_window = config.get("sliding_window") is not None
    window = config.positive("sliding_window") if has_window else None
    mixer = attention(config, rope(config, part=1.0, kinds=_KINDS), is_stored_fused=True)
    layer = block(config, mixer, dense(config, is_stored_fused=True))
    return decoder(config, with_windows(layer, config.same_window(window)))


FAMILIES = (
    Family(
        "Phi3ForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps sliding_window"),
        ignores=names("attention_bias"),
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
    ),
)
