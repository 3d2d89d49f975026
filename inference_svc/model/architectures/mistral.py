"""Mistral: Llama without biases, all of whose layers may attend to a window. Mixtral has experts in
place of its dense halves; releases of transformers before 5 call their module
`block_sparse_moe`."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    dense,
    experts,
    rope,
    router,
    with_windows,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder
from kernels.experts import Choice

_OLDER = "block_sparse_moe"


def describe(config: ConfigReader) -> Decoder:
    layer = block(config, attention(config, rope(config)), dense(config))
    return decoder(config, with_windows(layer, config.same_window(config.window)))


def describe_mixtral(config: ConfigReader) -> Decoder:
    choice = Choice(config.positive("num_experts_per_tok"), normalised=True)
    mixture = experts(
        config,
        router(config, choice, "num_local_experts", others=(f"{_OLDER}.gate",)),
        config.positive("intermediate_size"),
        others=tuple(
            (f"{module}.experts.w1", f"{module}.experts.w3", f"{module}.experts.w2")
            for module in (_OLDER, "mlp")
        ),
    )
    layer = block(config, attention(config, rope(config, theta=1e6)), mixture)
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
    Family(
        "MixtralForCausalLM",
        describe_mixtral,
        reads=names("hidden_act rms_norm_eps sliding_window num_experts_per_tok num_local_experts"),
        ignores=names("output_router_logits router_jitter_noise"),
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
    ),
)
