"""Parts of descriptions that most families have in common."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.config.reader import FULL, HEADS, MAX_HEADS, SLIDING, ConfigReader
from inference_svc.model.description import (
    Activation,
    Attention,
    Block,
    ClampedSwiglu,
    Decoder,
    Dense,
    Experts,
    ExpertsProjection,
    Head,
    Member,
    Norm,
    Projection,
    Recurrence,
    Router,
)
from inference_svc.model.rope import Rope, RopeFacts, parse_parameters, parse_rope
from kernels.experts import MAX_EXPERTS, Choice


def rope_facts(config: ConfigReader, **changes: Any) -> RopeFacts:
    return RopeFacts(config.positive("max_position_embeddings"), **changes)


def rope(config: ConfigReader, **changes: Any) -> Rope:
    """Returns the one rotation of a model; `changes` are of RopeFacts."""
    return parse_rope(config.given, rope_facts(config, **changes))


def rope_of_kind(
    config: ConfigReader, kind: str, facts: RopeFacts, older: Callable[[], Rope]
) -> Rope:
    """Returns the rotation of layers of this kind of attention: its part of `rope_parameters`, or
    else `older`, as files have it that know no kinds. Raises UnsupportedModel."""
    by_kind = config.get("rope_parameters") or {}
    is_by_kind = isinstance(by_kind, Mapping) and not by_kind.keys() - {FULL, SLIDING}
    if not is_by_kind or (by_kind and config.get("rope_scaling")):
        reason = f"must map {FULL} and {SLIDING} to parameters, and replace rope_scaling"
        raise config.unsupported("rope_parameters", reason)
    if by_kind.get(kind) is None:
        return older()
    return parse_parameters(by_kind[kind], f"rope_parameters.{kind}", {}, facts)


def norm(config: ConfigReader, module: str, size: int = 0, **changes: Any) -> Norm:
    """Returns a norm over the hidden size or `size`; `changes` are of Norm."""
    size = size or config.positive("hidden_size")
    return Norm(module, size, config.epsilon("rms_norm_eps"), **changes)


def attention(
    config: ConfigReader,
    rope: Rope | None,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    is_stored_fused: bool = False,
    has_gate: bool = False,
    **changes: Any,
) -> Attention:
    """Returns attention as in Llama; `changes` are of Attention."""
    hidden_size, head_dim = config.positive("hidden_size"), config.head_dim
    num_heads, num_kv_heads = config.within(HEADS, 1, MAX_HEADS), config.num_kv_heads
    _check_rope(config, rope, head_dim)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    members = (
        Member("self_attn.q_proj", (1 + has_gate) * q_size),
        Member("self_attn.k_proj", kv_size),
        Member("self_attn.v_proj", kv_size),
    )
    qkv = Projection(
        "qkv",
        members,
        hidden_size,
        has_bias=qkv_bias,
        fused="self_attn.qkv_proj",
        is_stored_fused=is_stored_fused,
    )
    out = Projection("o", (Member("self_attn.o_proj", hidden_size),), q_size, out_bias)
    changes = {"out": out, "scale": head_dim**-0.5} | changes
    return Attention(
        num_heads,
        num_kv_heads,
        head_dim,
        qkv=qkv,
        rope=rope,
        has_gate=has_gate,
        **changes,
    )


def _check_rope(config: ConfigReader, rope: Rope | None, head_dim: int) -> None:
    """Raises UnsupportedModel for a rotation that does not fit the heads."""
    if rope is None:
        return
    size = rope.rotary_size(head_dim)
    if size < 2 or size % 2:
        reason = f"turns {size} elements of a head, which must be even"
        raise config.unsupported("partial_rotary_factor", reason, rope.part)
    for factors in filter(None, (rope.long_factor, rope.short_factor)):
        if len(factors) != size // 2:
            raise UnsupportedModel(
                f"{config.where}: long_factor and short_factor must have {size // 2} numbers, one "
                f"for each pair that turns; one has {len(factors)}"
            )


def dense(
    config: ConfigReader,
    *,
    has_bias: bool = False,
    is_stored_fused: bool = False,
    activation: str = "hidden_act",
    module: str = "mlp",
    size: int = 0,
) -> Dense:
    """Returns a gated feed-forward half as in Llama, of `intermediate_size` or `size`; `activation`
    is its key."""
    hidden_size, size = config.positive("hidden_size"), size or config.positive("intermediate_size")
    members = (Member(f"{module}.gate_proj", size), Member(f"{module}.up_proj", size))
    gate_up = Projection(
        "gate_up",
        members,
        hidden_size,
        has_bias=has_bias,
        fused=f"{module}.gate_up_proj",
        is_stored_fused=is_stored_fused,
    )
    down = Projection("down", (Member(f"{module}.down_proj", hidden_size),), size, has_bias)
    return Dense(config.activation(activation), gate_up, down)


def router(
    config: ConfigReader,
    choice: Choice,
    num_experts: str,
    *,
    module: str = "mlp.gate",
    others: tuple[str, ...] = (),
    has_bias: bool = False,
    **changes: Any,
) -> Router:
    """Returns a router that reads the input of its half; `num_experts` is the key of their number,
    `changes` are of Router. Raises UnsupportedModel for a choice that there is not."""
    count = config.within(num_experts, 2, MAX_EXPERTS)
    if choice.num_chosen > count:
        raise UnsupportedModel(
            f"{config.where}: each token has {choice.num_chosen} experts of {count}"
        )
    members = (Member(module, count, others),)
    projection = Projection("router", members, config.positive("hidden_size"), has_bias)
    return Router(projection, choice, **changes)


def experts(
    config: ConfigReader,
    router: Router,
    size: int,
    *,
    activation: Activation | ClampedSwiglu | None = None,
    module: str = "mlp.experts",
    others: tuple[tuple[str, str, str], ...] = (),
    has_bias: bool = False,
    is_transposed: bool = False,
    is_interleaved: bool = False,
    **changes: Any,
) -> Experts:
    """Returns a mixture of experts of this size with gate, up and down projections, as in Qwen 3;
    `others` are further names of these, `changes` of Experts."""
    hidden_size, count = config.positive("hidden_size"), router.projection.out_features
    gate, up, down = (
        Member(f"{module}.{name}_proj", width, tuple(each[index] for each in others))
        for index, (name, width) in enumerate((("gate", size), ("up", size), ("down", hidden_size)))
    )
    return Experts(
        router,
        config.activation() if activation is None else activation,
        ExpertsProjection(
            "experts.gate_up",
            (gate, up),
            hidden_size,
            count,
            parameter=f"{module}.gate_up_proj",
            has_bias=has_bias,
            is_transposed=is_transposed,
            is_interleaved=is_interleaved,
        ),
        ExpertsProjection(
            "experts.down",
            (down,),
            size,
            count,
            parameter=f"{module}.down_proj",
            has_bias=has_bias,
            is_transposed=is_transposed,
        ),
        **changes,
    )


def block(
    config: ConfigReader,
    mixer: Attention | Recurrence,
    feed_forward: Dense | Experts,
    **changes: Any,
) -> Block:
    """Returns a layer with a norm before each half, as in Llama; `changes` are of Block."""
    changes.setdefault("attention_norm", norm(config, "input_layernorm"))
    changes.setdefault("feed_forward_norm", norm(config, "post_attention_layernorm"))
    return Block(mixer, feed_forward, **changes)


def with_windows(block: Block, windows: Iterable[int | None]) -> tuple[Block, ...]:
    """Returns the block for each layer, whose windows these are."""
    mixer = block.mixer
    assert isinstance(mixer, Attention)
    return tuple(replace(block, mixer=replace(mixer, window=window)) for window in windows)


def dense_layers(config: ConfigReader) -> Container[int]:
    """Returns the layers without a mixture: every `decoder_sparse_step`-th layer has it, but for
    `mlp_only_layers`. Raises UnsupportedModel if config.json has no such list."""
    step, listed = config.positive("decoder_sparse_step"), config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise config.unsupported("mlp_only_layers", "must be a list of layers")
    every = range(config.num_layers)
    return [layer for layer in every if layer in listed or (layer + 1) % step]


def with_experts(
    config: ConfigReader,
    mixers: Iterable[Attention | Recurrence],
    mixture: Experts,
    dense_layers: Container[int],
    **changes: Any,
) -> tuple[Block, ...]:
    """Returns layers with these mixers, all of which have the mixture but `dense_layers`."""
    return tuple(
        block(config, mixer, dense(config) if layer in dense_layers else mixture, **changes)
        for layer, mixer in enumerate(mixers)
    )


def decoder(config: ConfigReader, blocks: tuple[Block, ...], **changes: Any) -> Decoder:
    """Returns the decoder of these layers; `changes` are of Decoder. `model.architectures` fills in
    the parts that are the same for every family."""
    changes.setdefault("final_norm", norm(config, "model.norm"))
    changes.setdefault("head", Head(config.flag("tie_word_embeddings")))
    return Decoder(
        architecture="",
        config_sha256="",
        dtype="",
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=config.positive("max_position_embeddings"),
        blocks=blocks,
        **changes,
    )
