"""Mistral: Llama without biases, all of whose layers may attend to a window."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope, with_windows
from inference_svc.model.config_keys import names
from inference_svc.model.config_reader import ConfigReader
from inference_svc.model.description import Decoder


def describe(config: ConfigReader) -> Decoder:
    layer = block(config, attention(config, rope(config)), dense(config))
    return decoder(config, with_windows(layer, config.same_window(config.window)))


FAMILIES = (
    Family(
        "MistralForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps sliding_window"),
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
)
