"""HunYuan, dense: Llama with norms of each head's queries and keys after RoPE, whose base is
multiplied by a fixed factor."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import (
    attention,
    block,
    decoder,
    dense,
    norm,
    rope,
    with_windows,
)
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder


def describe(config: ConfigReader) -> Decoder:
    has_bias, head_dim = config.flag("attention_bias"), config.head_dim
    config.require_same("attention_head_dim", "head_dim")
    mixer = attention(
        config,
        rope(config, kinds={"dynamic": "dynamic"}),
        qkv_bias=has_bias,
        out_bias=has_bias,
        q_norm=norm(config, "self_attn.query_layernorm", head_dim),
        k_norm=norm(config, "self_attn.key_layernorm", head_dim),
        norms_rotated=True,
    )
    layer = block(config, mixer, dense(config))
    return decoder(config, with_windows(layer, config.same_window(None)))


FAMILIES = (
    Family(
        "HunYuanDenseV1ForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps attention_bias attention_head_dim"),
        ignores=names(
            """
            eod_token_id im_start_id im_end_id im_newline_id text_start_id text_end_id mask_init_id
            pad_id org_vocab_size pool_type class_num dense_list cla_share_factor auto_map
            """
        ),  # heads for classes, and sharing between layers (use_cla), are refused if switched on
        accepts={"norm_type": "rms", "use_qk_norm": True, "use_rotary_pos_emb": True},
        defaults={"vocab_size": 290943, "rms_norm_eps": 1e-5},
    ),
)
