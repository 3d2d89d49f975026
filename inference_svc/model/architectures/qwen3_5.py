"""Qwen 3.5 and 3 Next: three of four layers are a gated delta net, the others attention with a gate
of its output. Heads rotate a quarter of their elements. Heads that predict several tokens are left
out."""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    dense,
    dense_layers,
    experts,
    norm,
    rope,
    router,
)
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, LINEAR, MAX_HEADS, ConfigReader
from inference_svc.model.description import (
    Attention,
    Decoder,
    Dense,
    Experts,
    Member,
    Norm,
    Projection,
    Recurrence,
)
from inference_svc.model.mixers.gated_delta import GatedDelta
from kernels.experts import Choice
from kernels.recurrence import MAX_KERNEL, MAX_KEY_SIZE, MAX_VALUE_SIZE

_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""How positions of images turn; the ones of text turn as in Llama."""


def describe(config: ConfigReader) -> Decoder:
    return _describe(config, dense(config), _parts_apart(config))


def describe_moe(config: ConfigReader) -> Decoder:
    return _describe(config, _mixture(config), _parts_apart(config))


def describe_next(config: ConfigReader) -> Decoder:
    mixture = _mixture(config, normalised=config.flag("norm_topk_prob"))
    return _describe(config, mixture, _by_key_head(config), dense_layers(config))


def _describe(
    config: ConfigReader,
    half: Dense | Experts,
    mixer: GatedDelta,
    dense_layers: Container[int] = (),
) -> Decoder:
    mixers: Mapping[str, Attention | Recurrence] = {FULL: _attention(config), LINEAR: mixer}
    kinds = config.layer_types(_default_kind(config), (FULL, LINEAR))
    config.require_attention(kinds)
    blocks = tuple(
        block(
            config,
            mixers[kind],
            dense(config) if layer in dense_layers else half,
            attention_norm=_norm(config, "input_layernorm"),
            feed_forward_norm=_norm(config, "post_attention_layernorm"),
        )
        for layer, kind in enumerate(kinds)
    )
    final_norm, wrapper = _norm(config, "model.norm"), Wrapper(others=("mtp",))
    return decoder(config, blocks, final_norm=final_norm, wrapper=wrapper)


def _mixture(config: ConfigReader, *, normalised: bool = True) -> Experts:
    choice = Choice(config.positive("num_experts_per_tok"), normalised=normalised)
    chosen_by = router(config, choice, "num_experts")
    size = config.positive("shared_expert_intermediate_size")
    gate = Member("mlp.shared_expert_gate", 1)
    return experts(
        config,
        chosen_by,
        config.positive("moe_intermediate_size"),
        shared=dense(config, module="mlp.shared_expert", size=size),
        shared_gate=Projection("shared_gate", (gate,), config.positive("hidden_size")),
    )


def _default_kind(config: ConfigReader) -> Callable[[int], str]:
    interval = config.positive("full_attention_interval")
    return lambda layer: LINEAR if (layer + 1) % interval else FULL


def _norm(config: ConfigReader, module: str, size: int = 0) -> Norm:
    return norm(config, module, size, weight_offset=1.0, is_wide=True)


def _attention(config: ConfigReader) -> Attention:
    has_bias, head_dim = config.flag("attention_bias"), config.head_dim
    return attention(
        config,
        rope(config, part=0.25, other_keys=_OF_IMAGES),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_gate=True,
        q_norm=_norm(config, "self_attn.q_norm", head_dim),
        k_norm=_norm(config, "self_attn.k_norm", head_dim),
    )


def _parts_apart(config: ConfigReader) -> GatedDelta:
    key_size, value_size, num_values = _sizes(config)
    return _gated_delta(
        config,
        Member("linear_attn.in_proj_qkv", 2 * key_size + value_size),
        Member("linear_attn.in_proj_z", value_size),
        Member("linear_attn.in_proj_b", num_values),
        Member("linear_attn.in_proj_a", num_values),
    )


def _by_key_head(config: ConfigReader) -> GatedDelta:
    key_size, value_size, num_values = _sizes(config)
    mixer = _gated_delta(
        config,
        Member("linear_attn.in_proj_qkvz", 2 * (key_size + value_size)),
        Member("linear_attn.in_proj_ba", 2 * num_values),
    )
    return replace(mixer, is_by_key_head=True)


def _sizes(config: ConfigReader) -> tuple[int, int, int]:
    """Returns the sizes of all keys and of all values, and the number of value heads."""
    num_keys, num_values = (
        config.within(f"linear_num_{each}_heads", 1, MAX_HEADS) for each in _SIDES
    )
    if num_values % num_keys:
        reason = f"is no multiple of linear_num_key_heads {num_keys}"
        raise config.unsupported("linear_num_value_heads", reason)
    key_dim = config.within("linear_key_head_dim", 1, MAX_KEY_SIZE)
    value_dim = config.within("linear_value_head_dim", 1, MAX_VALUE_SIZE)
    return num_keys * key_dim, num_values * value_dim, num_values


def _gated_delta(config: ConfigReader, *members: Member) -> GatedDelta:
    hidden_size = config.positive("hidden_size")
    _, value_size, num_values = _sizes(config)
    value_dim = config.positive("linear_value_head_dim")
    return GatedDelta(
        out=Projection("o", (Member("linear_attn.out_proj", hidden_size),), value_size),
        into=Projection("delta_in", members, hidden_size),
        num_key_heads=config.positive("linear_num_key_heads"),
        num_value_heads=num_values,
        key_head_dim=config.positive("linear_key_head_dim"),
        value_head_dim=value_dim,
        kernel_size=config.within("linear_conv_kernel_dim", 2, MAX_KERNEL),
        conv="linear_attn.conv1d.weight",
        decay="linear_attn.A_log",
        decay_bias="linear_attn.dt_bias",
        norm=norm(config, "linear_attn.norm", value_dim),
    )


_SIDES = ("key", "value")
_READS = names(
    """
    hidden_act rms_norm_eps attention_bias full_attention_interval linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    """
)
_READS_MOE = names(
    "moe_intermediate_size num_experts num_experts_per_tok shared_expert_intermediate_size"
)
_IGNORES = names("mtp_num_hidden_layers mtp_use_dedicated_embeddings")
_ACCEPTS = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "use_sliding_window": False}
_DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DEFAULTS_MOE = {
    **_DEFAULTS,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

FAMILIES = (
    Family(
        "Qwen3_5ForCausalLM",
        describe,
        reads=_READS,
        ignores=_IGNORES,
        accepts=_ACCEPTS,
        defaults={
            **_DEFAULTS,
            "vocab_size": 248320,
            "intermediate_size": 12288,
            "num_key_value_heads": 4,
        },
    ),
    Family(
        "Qwen3_5MoeForCausalLM",
        describe_moe,
        reads=_READS | _READS_MOE,
        ignores=_IGNORES | names("output_router_logits intermediate_size"),
        accepts=_ACCEPTS,
        defaults={
            **_DEFAULTS_MOE,
            "vocab_size": 248320,
            "num_hidden_layers": 40,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    Family(
        "Qwen3NextForCausalLM",
        describe_next,
        reads=_READS | _READS_MOE | names("norm_topk_prob decoder_sparse_step mlp_only_layers"),
        ignores=_IGNORES | names("output_router_logits"),
        accepts=_ACCEPTS,
        defaults={
            **_DEFAULTS_MOE,
            "vocab_size": 151936,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
)
