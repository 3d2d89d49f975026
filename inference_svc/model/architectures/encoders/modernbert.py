"""ModernBERT: a LayerNorm before each half but the first; RoPE; a window in two of three layers;
GELU with a gate. q, k and v are in one tensor, gate and up in another."""

from __future__ import annotations

from functools import partial

from inference_svc.model.architectures import Family
from inference_svc.model.building import rope_facts, rope_of_kind
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import FULL, HEADS, MAX_HEADS, SLIDING, ConfigReader
from inference_svc.model.description import (
    EMBED_TOKENS,
    Activation,
    Block,
    BothWays,
    Decoder,
    Dense,
    EncoderHead,
    EncoderInputs,
    Head,
    Member,
    Norm,
    NormKind,
    Projection,
)
from inference_svc.model.rope import Rope
from inference_svc.results.embedding_rule import Pooling

WRAPPER = Wrapper(
    prefixes=(
        ("model.layers.", "model.layers."),
        ("model.embeddings.tok_embeddings.", f"{EMBED_TOKENS}."),
        ("model.", ""),
        ("layers.", "model.layers."),
        ("embeddings.tok_embeddings.", f"{EMBED_TOKENS}."),
    )
)
"""The names of checkpoints, with and without a head."""
POOLINGS = {"cls": Pooling.FIRST, "mean": Pooling.MEAN}
"""The tokens that a classifier's head reads, by their names in config.json."""
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""The keys of older files, and the base that transformers assumes, by the kind of a layer."""


def describe(config: ConfigReader) -> Decoder:
    every = config.positive("global_attn_every_n_layers")
    types = config.layer_types(lambda layer: SLIDING if layer % every else FULL)
    ropes = {kind: _rope_of(config, kind) for kind in dict.fromkeys(types)}
    mixers = {kind: _attention(config, ropes[kind], kind) for kind in ropes}
    feed_forward = _dense(config)
    norm = partial(_norm, config)
    return Decoder(
        architecture="",
        config_sha256="",
        dtype="",
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=config.positive("max_position_embeddings"),
        blocks=tuple(
            Block(
                mixers[kind], feed_forward, norm("attn_norm") if layer else None, norm("mlp_norm")
            )
            for layer, kind in enumerate(types)
        ),
        final_norm=norm("final_norm"),
        head=Head(is_tied=True),
        wrapper=WRAPPER,
        generates=False,
        encoder=EncoderInputs(
            norm=norm("embeddings.norm"),
            unused=("head.", "decoder.", "classifier."),
            head=_head(config),
        ),
    )


def _head(config: ConfigReader) -> EncoderHead:
    pooling = config.get("classifier_pooling")
    if pooling not in POOLINGS:
        raise config.unsupported("classifier_pooling", f"supported are {', '.join(POOLINGS)}")
    return EncoderHead(
        "head.dense",
        "classifier",
        is_adapters=False,
        has_dense_bias=config.flag("classifier_bias"),
        activation=config.activation("classifier_activation", also=(Activation.GELU,)),
        norm=_norm(config, "head.norm"),
        pooling=POOLINGS[pooling],
    )


def _rope_of(config: ConfigReader, kind: str) -> Rope:
    """Returns the rotation of layers of this kind."""
    key, theta = THETAS[kind]
    facts = rope_facts(config, theta=theta)
    return rope_of_kind(config, kind, facts, lambda: Rope(rope_theta=config.number(key)))


def _norm(config: ConfigReader, module: str) -> Norm:
    size, eps = config.positive("hidden_size"), config.epsilon("norm_eps")
    has_bias = config.flag("norm_bias")
    return Norm(module, size, eps, NormKind.LAYER, is_wide=True, has_bias=has_bias)


def _attention(config: ConfigReader, rope: Rope, kind: str) -> BothWays:
    hidden_size, head_dim = config.positive("hidden_size"), config.head_dim
    num_heads, has_bias = config.within(HEADS, 1, MAX_HEADS), config.flag("attention_bias")
    members = tuple(Member(f"attn.{name}_proj", hidden_size) for name in "qkv")
    return BothWays(
        num_heads,
        head_dim,
        head_dim**-0.5,
        Projection("qkv", members, hidden_size, has_bias, fused="attn.Wqkv", is_stored_fused=True),
        Projection("o", (Member("attn.Wo", hidden_size),), hidden_size, has_bias),
        rope,
        config.positive("local_attention") // 2 if kind == SLIDING else None,
    )


def _dense(config: ConfigReader) -> Dense:
    hidden_size, size = config.positive("hidden_size"), config.positive("intermediate_size")
    has_bias, members = config.flag("mlp_bias"), ("mlp.gate_proj", "mlp.up_proj")
    return Dense(
        config.activation("hidden_activation", also=(Activation.GELU,)),
        Projection(
            "gate_up",
            tuple(Member(module, size) for module in members),
            hidden_size,
            has_bias,
            fused="mlp.Wi",
            is_stored_fused=True,
        ),
        Projection("down", (Member("mlp.Wo", hidden_size),), size, has_bias),
    )


FAMILIES = (
    Family(
        "ModernBertModel",
        describe,
        reads=names(
            """
            hidden_activation norm_eps norm_bias attention_bias mlp_bias local_attention
            global_attn_every_n_layers global_rope_theta local_rope_theta
            classifier_pooling classifier_bias classifier_activation
            """
        ),
        ignores=names(
            """
            initializer_cutoff_factor embedding_dropout mlp_dropout decoder_bias layer_norm_eps
            classifier_dropout deterministic_flash_attn sparse_prediction sparse_pred_ignore_index
            reference_compile repad_logits_with_grad
            """
        ),
        accepts={"position_embedding_type": "absolute"},
        defaults={
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "hidden_activation": "gelu",
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": THETAS[FULL][1],
            "local_rope_theta": THETAS[SLIDING][1],
            "classifier_pooling": "cls",
            "classifier_activation": "gelu",
            "tie_word_embeddings": True,
            "eos_token_id": None,
        },
    ),
)
