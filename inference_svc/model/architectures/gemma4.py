"""Gemma 4: as Gemma 3, with larger heads in layers of full attention, and values that have a norm
and may be the keys. The last layers read the keys and values of earlier layers; they have no
`k_proj` and `v_proj`. Per-layer inputs come from an embedding of their own,
`embed_tokens_per_layer`, which adapters may not change; they may change
`per_layer_model_projection`, `per_layer_input_gate` and `per_layer_projection`. Mixtures have a
dense half and experts in parallel, each with its own norm of the residual stream. In layers with
windows the tokens of an image may see each other."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    dense,
    experts,
    norm,
    rope_facts,
    rope_of_kind,
    router,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import (
    FULL,
    HEADS,
    KV_HEADS,
    SLIDING,
    ConfigReader,
    every_full,
)
from inference_svc.model.description import (
    LAYER_INPUTS,
    Attention,
    Block,
    Decoder,
    Dense,
    Experts,
    Head,
    LayerInput,
    LayerInputs,
    Member,
    Projection,
)
from inference_svc.model.rope import Rope, parse_parameters
from kernels.experts import Choice

_norm = partial(norm, is_wide=True)
_UNUSED = tuple(f"self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
"""The tensors in published files of layers that read other layers' keys and values."""
MUTUAL = "use_bidirectional_attention"
_THETAS = {FULL: 1e6, SLIDING: 1e4}


def describe_gemma4(config: ConfigReader) -> Decoder:
    """Raises UnsupportedModel."""
    if config.get(MUTUAL) not in (None, "vision"):
        raise config.unsupported(MUTUAL, "text that attends to later tokens is not supported")
    types = list(config.layer_types(every_full(6)))
    types[-1] = FULL  # as transformers does
    mixers = _mixers(config, types)
    input_size = config.count("hidden_size_per_layer_input")
    return decoder(
        config,
        tuple(_block(config, mixer, input_size) for mixer in mixers),
        final_norm=_norm(config, "model.norm"),
        head=Head(
            config.flag("tie_word_embeddings"), softcap=config.optional("final_logit_softcapping")
        ),
        embedding_scale=config.positive("hidden_size") ** 0.5,
        layer_inputs=_layer_inputs(config, input_size) if input_size else None,
    )


def _mixers(config: ConfigReader, types: Sequence[str]) -> list[Attention]:
    ropes = {kind: _rope_of(config, kind) for kind in dict.fromkeys(types)}
    readers = [_reader_of(config, layer, kind) for layer, kind in enumerate(types)]
    num_own = config.num_layers - config.count("num_kv_shared_layers")
    windows = config.windows(tuple(types))
    mixers: list[Attention] = []
    for layer, (reader, kind) in enumerate(zip(readers, types, strict=True)):
        kv_layer = None
        if layer >= num_own:
            kv_layer = _last_of(config, types[: max(num_own, 0)], kind)
        mixer = _mixer(reader, ropes[kind], kind, kv_layer)
        if kv_layer is not None and mixer.kv_shape != mixers[kv_layer].kv_shape:
            reason = f"layer {layer} cannot read the keys of layer {kv_layer}, of another shape"
            raise config.unsupported("num_kv_shared_layers", reason)
        only_back = config.get(MUTUAL) is not None and kind == FULL
        mixers.append(replace(mixer, window=windows[layer], only_looks_back=only_back))
    return mixers


def _last_of(config: ConfigReader, types: Sequence[str], kind: str) -> int:
    """Returns the last layer of this kind."""
    if kind not in types:
        raise config.unsupported("num_kv_shared_layers", f"leaves no layer of {kind} with keys")
    return max(layer for layer, each in enumerate(types) if each == kind)


def _reader_of(config: ConfigReader, layer: int, kind: str) -> ConfigReader:
    """Returns the config with the heads of a layer, which newer files have in
    `per_layer_config`."""
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        if kind != FULL:
            return config
        changes = {"head_dim": config.positive("global_head_dim")}
        if config.flag("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            changes[KV_HEADS] = config.positive("num_global_key_value_heads")
        return config.with_values(**changes)
    if not isinstance(by_layer, dict) or not all(str(key).isdigit() for key in by_layer):
        raise config.unsupported("per_layer_config", "must map layers to their differing values")
    found = {int(key): values for key, values in by_layer.items()}.get(layer, {})
    if not isinstance(found, dict) or found.keys() - {"head_dim", KV_HEADS}:
        reason = f"layers may differ in head_dim and {KV_HEADS} only"
        raise config.unsupported("per_layer_config", reason, found)
    return config.with_values(**found)


def _mixer(config: ConfigReader, rope: Rope, kind: str, kv_layer: int | None) -> Attention:
    has_bias, head_dim = config.flag("attention_bias"), config.head_dim
    has_values = kind == SLIDING or not config.flag("attention_k_eq_v")
    mixer = attention(
        config,
        rope,
        qkv_bias=has_bias,
        out_bias=has_bias,
        scale=1.0,
        q_norm=_norm(config, "self_attn.q_norm", head_dim),
        kv_layer=kv_layer,
        values_are_keys=not has_values and kv_layer is None,
    )
    num_members = 1 if kv_layer is not None else 3 if has_values else 2
    if kv_layer is None:
        k_norm, v_norm = _norm(config, "self_attn.k_norm", head_dim), _norm(config, "", head_dim)
        mixer = replace(mixer, k_norm=k_norm, v_norm=v_norm)
    if num_members == 3:
        return mixer
    members = mixer.qkv.members[:num_members]
    return replace(mixer, qkv=replace(mixer.qkv, members=members, fused=""))


def _rope_of(config: ConfigReader, kind: str) -> Rope:
    if config.get("rope_scaling"):
        raise config.unsupported("rope_scaling", "rope_parameters says it for this family")
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25} if kind == FULL else {}
    facts = rope_facts(
        config, theta=_THETAS[kind], part=1.0, kinds={"proportional": "proportional"}
    )
    where = f"rope_parameters.{kind}"
    return rope_of_kind(config, kind, facts, lambda: parse_parameters(default, where, {}, facts))


def _block(config: ConfigReader, mixer: Attention, input_size: int) -> Block:
    is_shared = mixer.kv_layer is not None
    if is_shared and config.flag("use_double_wide_mlp"):
        config = config.with_values(intermediate_size=2 * config.positive("intermediate_size"))
    activation, hidden_size = "hidden_activation", config.positive("hidden_size")
    layer_input = None
    if input_size:
        gate = Member("per_layer_input_gate", input_size)
        out = Member("per_layer_projection", hidden_size)
        layer_input = LayerInput(
            config.activation(activation),
            Projection("layer_input_gate", (gate,), hidden_size),
            Projection("layer_input_out", (out,), input_size),
        )
    half = dense(config, activation=activation)
    return block(
        config,
        mixer,
        _mixture(config, half) if config.flag("enable_moe_block") else half,
        attention_norm=_norm(config, "input_layernorm"),
        attention_post_norm=_norm(config, "post_attention_layernorm"),
        feed_forward_norm=_norm(config, "pre_feedforward_layernorm"),
        feed_forward_post_norm=_norm(config, "post_feedforward_layernorm"),
        layer_input=layer_input,
        layer_input_post_norm=_norm(config, "post_per_layer_input_norm") if input_size else None,
        scalar="layer_scalar",
        unused=_UNUSED if is_shared else (),
    )


def _mixture(config: ConfigReader, shared: Dense) -> Experts:
    hidden_size = config.positive("hidden_size")
    router_norm = _norm(config, "router", tensor="router.scale", weight_scale=hidden_size**-0.5)
    return experts(
        config,
        router(
            config,
            Choice(config.positive("top_k_experts"), normalised=True),
            "num_experts",
            module="router.proj",
            norm=router_norm,
            expert_scales="router.per_expert_scale",
        ),
        config.positive("moe_intermediate_size"),
        activation=shared.activation,
        module="experts",
        shared=shared,
        norm=_norm(config, "pre_feedforward_layernorm_2"),
        post_norm=_norm(config, "post_feedforward_layernorm_2"),
        shared_post_norm=_norm(config, "post_feedforward_layernorm_1"),
    )


def _layer_inputs(config: ConfigReader, size: int) -> LayerInputs:
    vocab_size, hidden_size = config.positive("vocab_size"), config.positive("hidden_size")
    if config.positive("vocab_size_per_layer_input") < vocab_size:
        reason = f"must be at least vocab_size, {vocab_size}"
        raise config.unsupported("vocab_size_per_layer_input", reason)
    module = Member("model.per_layer_model_projection", config.num_layers * size)
    return LayerInputs(
        "model.embed_tokens_per_layer",
        config.positive("vocab_size_per_layer_input"),
        size,
        Projection(LAYER_INPUTS, (module,), hidden_size),
        _norm(config, "model.per_layer_projection_norm", size),
        embedding_scale=size**0.5,
        projection_scale=hidden_size**-0.5,
        scale=2.0**-0.5,
    )


FAMILIES = (
    Family(
        "Gemma4ForCausalLM",
        describe_gemma4,
        reads=names(
            """
            rms_norm_eps hidden_activation attention_bias sliding_window final_logit_softcapping
            per_layer_config global_head_dim num_global_key_value_heads attention_k_eq_v
            num_kv_shared_layers use_double_wide_mlp hidden_size_per_layer_input
            vocab_size_per_layer_input enable_moe_block use_bidirectional_attention num_experts
            top_k_experts moe_intermediate_size
            """
        ),
        ignores=names("hidden_act"),
        defaults={
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            HEADS: 8,
            KV_HEADS: 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
        },
    ),
)
