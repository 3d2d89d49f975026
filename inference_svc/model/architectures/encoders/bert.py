"""BERT, RoBERTa and XLM-RoBERTa: learned positions and token types; a LayerNorm of each sum; GELU
without a gate."""

from __future__ import annotations

from functools import partial

from inference_svc.model.architectures import Family
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import HEADS, MAX_HEADS, ConfigReader
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
    Positions,
    Projection,
)


def wrapper(tower: str) -> Wrapper:
    """Returns how checkpoints name an encoder's modules: below `tower`, such as "bert.", or not."""
    inner = (
        ("embeddings.word_embeddings.", f"{EMBED_TOKENS}."),
        ("encoder.layer.", "model.layers."),
        ("", ""),
    )
    below = tuple((tower + prefix, meant) for prefix, meant in inner)
    return Wrapper(prefixes=(*below, *inner[:2]))


BERTS_HEAD = EncoderHead("pooler.dense", "classifier", is_adapters=False)
ROBERTAS_HEAD = EncoderHead("classifier.dense", "classifier.out_proj", is_adapters=True)


def describe(config: ConfigReader, tower: str, *, counts_from_padding: bool) -> Decoder:
    """Returns an encoder. Its first position is the row behind the padding token's, if it
    `counts_from_padding`. Raises UnsupportedModel."""
    if config.flag("is_decoder"):
        raise config.unsupported("is_decoder", "only encoders are served of this class")
    num_rows = config.positive("max_position_embeddings")
    first = config.count("pad_token_id") + 1 if counts_from_padding else 0
    if first >= num_rows:
        raise config.unsupported("pad_token_id", f"max_position_embeddings is {num_rows}")
    inputs = EncoderInputs(
        norm=_norm(config, "embeddings.LayerNorm"),
        positions=Positions("embeddings.position_embeddings", num_rows, first),
        token_types="embeddings.token_type_embeddings",
        num_token_types=config.positive("type_vocab_size"),
        unused=("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids"),
        head=ROBERTAS_HEAD if counts_from_padding else BERTS_HEAD,
    )
    block = Block(
        _attention(config),
        _dense(config),
        attention_norm=None,
        feed_forward_norm=None,
        attention_sum_norm=_norm(config, "attention.output.LayerNorm"),
        feed_forward_sum_norm=_norm(config, "output.LayerNorm"),
    )
    return Decoder(
        architecture="",
        config_sha256="",
        dtype="",
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=num_rows - first,
        blocks=(block,) * config.num_layers,
        final_norm=None,
        head=Head(is_tied=True),
        wrapper=wrapper(tower),
        generates=False,
        encoder=inputs,
    )


def _norm(config: ConfigReader, module: str) -> Norm:
    size, eps = config.positive("hidden_size"), config.epsilon("layer_norm_eps")
    return Norm(module, size, eps, NormKind.LAYER, is_wide=True, has_bias=True)


def _attention(config: ConfigReader) -> BothWays:
    hidden_size, num_heads = config.positive("hidden_size"), config.within(HEADS, 1, MAX_HEADS)
    if hidden_size % num_heads:
        raise config.unsupported("hidden_size", f"not a multiple of {num_heads} heads")
    head_dim = hidden_size // num_heads
    modules = (f"attention.self.{name}" for name in ("query", "key", "value"))
    members = tuple(Member(module, hidden_size) for module in modules)
    out = Member("attention.output.dense", hidden_size)
    return BothWays(
        num_heads,
        head_dim,
        head_dim**-0.5,
        Projection("qkv", members, hidden_size, has_bias=True),
        Projection("o", (out,), hidden_size, has_bias=True),
    )


def _dense(config: ConfigReader) -> Dense:
    hidden_size, size = config.positive("hidden_size"), config.positive("intermediate_size")
    return Dense(
        config.activation(also=(Activation.GELU,)),
        Projection("gate_up", (Member("intermediate.dense", size),), hidden_size, has_bias=True),
        Projection("down", (Member("output.dense", hidden_size),), size, has_bias=True),
        is_gated=False,
    )


def _family(architecture: str, tower: str, *, counts_from_padding: bool) -> Family:
    return Family(
        architecture,
        partial(describe, tower=tower, counts_from_padding=counts_from_padding),
        reads=names("hidden_act layer_norm_eps type_vocab_size pad_token_id is_decoder"),
        ignores=names(
            """
            hidden_dropout_prob attention_probs_dropout_prob classifier_dropout output_past
            directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
            pooler_size_per_head pooler_type
            """
        ),
        accepts={"position_embedding_type": "absolute"},
        defaults={
            "vocab_size": 30522,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "hidden_act": "gelu",
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "pad_token_id": 1 if counts_from_padding else 0,
            "tie_word_embeddings": True,
            "eos_token_id": None,
        }
        | ({"vocab_size": 50265} if architecture == "RobertaModel" else {}),
    )


FAMILIES = (
    _family("BertModel", "bert.", counts_from_padding=False),
    _family("RobertaModel", "roberta.", counts_from_padding=True),
    _family("XLMRobertaModel", "roberta.", counts_from_padding=True),
)
