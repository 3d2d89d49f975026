"""Llama: the decoder that this table compares the others with."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope, with_windows
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder


def describe(config: ConfigReader) -> Decoder:
    has_bias = config.flag("attention_bias")
    mixer = attention(config, rope(config), qkv_bias=has_bias, out_bias=has_bias)
    layer = block(config, mixer, dense(config, has_bias=config.flag("mlp_bias")))
    return decoder(config, with_windows(layer, config.same_window(None)))


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps attention_bias mlp_bias"),
    ),
)
