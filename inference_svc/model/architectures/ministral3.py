"""Ministral 3: Mistral with queries scaled up at later positions."""

from inference_svc.model.architectures import Family
from inference_svc.model.building import attention, block, decoder, dense, rope, with_windows
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder, QueryGrowth

_BETA = "llama_4_scaling_beta"
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}


def describe(config: ConfigReader) -> Decoder:
    """Raises UnsupportedModel."""
    given = config.get("rope_scaling") or config.get("rope_parameters")
    if given is None:
        given = _DEFAULT_ROPE
        config = config.with_values(rope_parameters=given)
    turned = rope(config, other_keys=(_BETA, "max_position_embeddings"))
    growth = None
    beta = given.get(_BETA)
    if beta is not None:
        if not isinstance(beta, int | float) or not turned.original_max_position_embeddings:
            raise config.unsupported(f"rope_parameters.{_BETA}", "must be a number", beta)
        growth = QueryGrowth(float(beta), turned.original_max_position_embeddings)
    mixer = attention(config, turned, query_growth=growth)
    layer = block(config, mixer, dense(config))
    return decoder(config, with_windows(layer, config.same_window(config.window)))


FAMILIES = (
    Family(
        "Ministral3ForCausalLM",
        describe,
        reads=names("hidden_act rms_norm_eps sliding_window"),
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
        },
    ),
)
