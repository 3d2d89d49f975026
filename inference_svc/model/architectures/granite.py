"""Granite: Llama with four multipliers: of embeddings, scores, each half's output, and logits."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope, with_windows
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder, Head


def describe(config: ConfigReader) -> Decoder:
    has_bias = config.flag("attention_bias")
    mixer = attention(
        config,
        rope(config),
        qkv_bias=has_bias,
        out_bias=has_bias,
        scale=config.number("attention_multiplier"),
    )
    layer = block(
        config,
        mixer,
        dense(config, has_bias=config.flag("mlp_bias")),
        residual_scale=config.number("residual_multiplier"),
    )
    return decoder(
        config,
        with_windows(layer, config.same_window(None)),
        head=Head(config.flag("tie_word_embeddings"), 1 / config.number("logits_scaling")),
        embedding_scale=config.number("embedding_multiplier"),
    )


FAMILIES = (
    Family(
        "GraniteForCausalLM",
        describe,
        reads=names(
            """
            hidden_act rms_norm_eps attention_bias mlp_bias
            attention_multiplier embedding_multiplier logits_scaling residual_multiplier
            """
        ),
        defaults={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        },
    ),
)
