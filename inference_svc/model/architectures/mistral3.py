"""Mistral 3 with images: Pixtral's tower, a connector that joins neighbouring patches, and
Mistral's or Ministral 3's decoder."""

from __future__ import annotations

from inference_svc.model.architectures import Family, describe_text_part
from inference_svc.model.architectures.llava import WRAPPER
from inference_svc.model.architectures.towers import pixtral
from inference_svc.model.architectures.towers.vit import feature_layer
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import (
    Activation,
    Connector,
    Decoder,
    Member,
    Merging,
    Norm,
    Pictures,
    Projection,
)

TOWER, CONNECTOR = "vision_tower", "multi_modal_projector"
TEXTS = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
MAX_MERGE = 16
OF_TOWER = pixtral.wrapper(TOWER, CONNECTOR, ("language_model", "lm_head"))


def describe(config: ConfigReader) -> Decoder:
    return describe_text_part(config, TEXTS, WRAPPER)


def _pictures(config: ConfigReader, decoder: Decoder) -> Pictures:
    vision = pixtral.read_vision(config)
    merge = config.within("spatial_merge_size", 1, MAX_MERGE)
    width, size = vision.positive("hidden_size"), decoder.hidden_size
    has_bias = config.flag("multimodal_projector_bias")
    layers = (
        Projection(
            "merged_patches",
            (Member(f"{CONNECTOR}.patch_merger.merging_layer", width),),
            width * merge**2,
        ),
        Projection("connector_1", (Member(f"{CONNECTOR}.linear_1", size),), width, has_bias),
        Projection("connector_2", (Member(f"{CONNECTOR}.linear_2", size),), size, has_bias),
    )
    activation = config.activation("projector_hidden_act", also=(Activation.GELU,))
    assert decoder.final_norm is not None
    tower = pixtral.describe_tower(
        vision,
        Connector(layers, activation, Merging.TAKING_TURNS),
        OF_TOWER,
        Norm(f"{CONNECTOR}.norm", width, decoder.final_norm.eps),
        num_layers=feature_layer(config, vision.num_layers),
        merge=merge,
    )
    token_id = config.count(config.name_of("image_token_index", "image_token_id"))
    return Pictures(tower, token_id, has_rows=True)


FAMILIES = (
    Family(
        "Mistral3ForConditionalGeneration",
        describe,
        reads=names(
            """
            text_config vision_config image_token_index image_token_id projector_hidden_act
            vision_feature_layer multimodal_projector_bias spatial_merge_size
            """
        ),
        ignores=names(
            """
            boi_token_index boi_token_id eoi_token_index eoi_token_id mm_tokens_per_image
            """
        ),
        defaults={
            "tie_word_embeddings": True,
            "eos_token_id": None,
            "image_token_index": 10,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "multimodal_projector_bias": False,
            "spatial_merge_size": 2,
        },
        pictures=_pictures,
    ),
)
