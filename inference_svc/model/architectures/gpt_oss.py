"""GPT-OSS: every other layer attends to a window, and each head has an attention sink. All layers
have experts with biases, a clamped activation, and interleaved gate and up outputs. Serve its
weights in bf16; the server refuses MXFP4."""

from dataclasses import replace

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, experts, rope_facts, router
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import HEADS, KV_HEADS, ConfigReader, every_full
from inference_svc.model.description import ClampedSwiglu, Decoder
from inference_svc.model.rope import Rope, parse_rope
from kernels.experts import Choice, Scoring

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def describe(config: ConfigReader) -> Decoder:
    has_bias = config.flag("attention_bias")
    mixer = attention(
        config, _rope(config), qkv_bias=has_bias, out_bias=has_bias, sinks="self_attn.sinks"
    )
    choice = Choice(config.positive("num_experts_per_tok"), Scoring.SOFTMAX_OF_CHOSEN)
    mixture = experts(
        config,
        router(config, choice, "num_local_experts", module="mlp.router", has_bias=True),
        config.positive("intermediate_size"),
        activation=ClampedSwiglu(config.number("swiglu_alpha"), config.number("swiglu_limit")),
        has_bias=True,
        is_transposed=True,
        is_interleaved=True,
    )
    windows = config.windows(config.layer_types(every_full(2)))
    mixers = (replace(mixer, window=window) for window in windows)
    return decoder(config, tuple(block(config, mixer, mixture) for mixer in mixers))


def _rope(config: ConfigReader) -> Rope:
    """Returns the rotation, which is YaRN where config.json says nothing."""
    given = config.given
    if not given.get("rope_parameters") and not given.get("rope_scaling"):
        given = {**given, "rope_scaling": _YARN}
    return parse_rope(given, rope_facts(config, theta=150_000.0))


FAMILIES = (
    Family(
        "GptOssForCausalLM",
        describe,
        reads=names(
            """
            rms_norm_eps sliding_window attention_bias num_local_experts num_experts_per_tok
            swiglu_alpha swiglu_limit
            """
        ),
        ignores=names("output_router_logits hidden_act initial_context_length experts_per_token"),
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            HEADS: 64,
            KV_HEADS: 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "eos_token_id": None,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
)
