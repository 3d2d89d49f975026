"""LLaVA: a tower of CLIP or SigLIP, a connector of two layers, and a Llama-like decoder."""

from __future__ import annotations

from collections.abc import Mapping

from inference_svc.model.architectures import Family, describe_text_part
from inference_svc.model.architectures.towers.vit import (
    describe_tower,
    feature_layer,
    read_vision,
    wrapper,
)
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import (
    Activation,
    Connector,
    Decoder,
    Member,
    Pictures,
    Projection,
)

TOWER, CONNECTOR = "vision_tower", "multi_modal_projector"
TEXTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
TOWERS = ("clip_vision_model", "siglip_vision_model")
WRAPPER = Wrapper(
    prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    others=(TOWER, CONNECTOR),
    tower_prefixes=(("vision_tower.vision_model.", "vision_tower."),),
)
"""The names that transformers has used, before its release 5 and since."""
OF_TOWER = wrapper(TOWER, CONNECTOR, ("language_model", "lm_head"))


def describe(config: ConfigReader) -> Decoder:
    text = config.get("text_config")
    is_tied = isinstance(text, Mapping) and text.get("tie_word_embeddings") is True
    if is_tied and not config.flag("tie_word_embeddings"):
        config = config.with_values(tie_word_embeddings=True)
    return describe_text_part(config, TEXTS, WRAPPER)


def _pictures(config: ConfigReader, decoder: Decoder) -> Pictures:
    vision, kind = read_vision(config, TOWERS)
    num_layers = feature_layer(config, vision.num_layers)
    strategy = config.get("vision_feature_select_strategy")
    if strategy not in ("default", "full"):
        raise config.unsupported("vision_feature_select_strategy", "must be default or full")
    has_bias = config.flag("multimodal_projector_bias")
    sizes = ((1, vision.positive("hidden_size")), (2, decoder.hidden_size))
    layers = tuple(
        Projection(
            f"connector_{index}",
            (Member(f"{CONNECTOR}.linear_{index}", decoder.hidden_size),),
            size,
            has_bias=has_bias,
        )
        for index, size in sizes
    )
    activation = config.activation("projector_hidden_act", also=(Activation.GELU,))
    tower = describe_tower(
        vision,
        kind,
        Connector(layers, activation),
        OF_TOWER,
        num_layers=num_layers,
        num_dropped=int(strategy == "default"),
    )
    return Pictures(tower, config.count(config.name_of("image_token_index", "image_token_id")))


FAMILIES = (
    Family(
        "LlavaForConditionalGeneration",
        describe,
        reads=names(
            """
            text_config vision_config image_token_index image_token_id projector_hidden_act
            vision_feature_layer vision_feature_select_strategy multimodal_projector_bias
            """
        ),
        ignores=names("image_seq_length ignore_index"),
        defaults={
            "tie_word_embeddings": False,
            "eos_token_id": None,
            "image_token_index": 32000,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "multimodal_projector_bias": True,
        },
        pictures=_pictures,
    ),
)
