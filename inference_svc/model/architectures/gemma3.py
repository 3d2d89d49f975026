"""Gemma 3 with images: a tower of SigLIP, a connector that takes the mean of neighbouring patches,
and Gemma 3's decoder, in which the tokens of an image see each other."""

from __future__ import annotations

import math

from inference_svc.model.architectures import Family, describe_text_part
from inference_svc.model.architectures.llava import WRAPPER
from inference_svc.model.architectures.towers.vit import describe_tower, read_vision, wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import (
    Connector,
    Decoder,
    Member,
    Merging,
    Norm,
    Pictures,
    Projection,
)
from inference_svc.pictures.prompt import Frame

TOWER, CONNECTOR = "vision_tower", "multi_modal_projector"
PROJECTION = f"{CONNECTOR}.mm_input_projection"
MAX_TOKENS = 1 << 12
_OF_PARTS = wrapper(TOWER, CONNECTOR, ("language_model", "lm_head"))
# The connector's matrix is no module of its own.
OF_TOWER = _OF_PARTS._replace(
    prefixes=(
        *((f"{whole}{PROJECTION}_weight", f"{PROJECTION}.weight") for whole in ("model.", "")),
        *_OF_PARTS.prefixes,
    )
)


def describe(config: ConfigReader) -> Decoder:
    return describe_text_part(config, {"gemma3_text": "Gemma3ForCausalLM"}, WRAPPER)


def _pictures(config: ConfigReader, decoder: Decoder) -> Pictures:
    vision, kind = read_vision(config, ("siglip_vision_model",))
    size = vision.positive("hidden_size")
    projection = Projection(
        "connector", (Member(PROJECTION, decoder.hidden_size),), size, is_transposed=True
    )
    norm = Norm(
        f"{CONNECTOR}.mm_soft_emb_norm",
        size,
        vision.epsilon("layer_norm_eps"),
        weight_offset=1.0,
        is_wide=True,
    )
    connector = Connector((projection,), merging=Merging.MEAN, norm=norm)
    tower = describe_tower(
        vision,
        kind,
        connector,
        OF_TOWER,
        num_layers=vision.num_layers,
        merge=_merge(config, vision),
        has_last_norm=True,
    )
    marks = (("boi_token_index", "boi_token_id"), ("eoi_token_index", "eoi_token_id"))
    begin, end = (config.count(config.name_of(*each)) for each in marks)
    token_id = config.count(config.name_of("image_token_index", "image_token_id"))
    return Pictures(tower, token_id, are_mutual=True, frame=Frame(begin, end, "\n\n"))


def _merge(config: ConfigReader, vision: ConfigReader) -> int:
    """Returns how many patches each side become one token. Raises UnsupportedModel."""
    count = config.within("mm_tokens_per_image", 1, MAX_TOKENS)
    per_side = math.isqrt(count)
    patches = vision.positive("image_size") // vision.positive("patch_size")
    if per_side**2 != count or patches % per_side or not patches:
        reason = f"must be a square of a number that divides the tower's {patches} patches a side"
        raise config.unsupported("mm_tokens_per_image", reason)
    return patches // per_side


FAMILIES = (
    Family(
        "Gemma3ForConditionalGeneration",
        describe,
        reads=names(
            """
            text_config vision_config image_token_index image_token_id boi_token_index boi_token_id
            eoi_token_index eoi_token_id mm_tokens_per_image
            """
        ),
        ignores=names(
            """
            projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size
            """
        ),
        defaults={
            "tie_word_embeddings": True,
            "eos_token_id": None,
            "image_token_index": 262_144,
            "boi_token_index": 255_999,
            "eoi_token_index": 256_000,
            "mm_tokens_per_image": 256,
        },
        pictures=_pictures,
    ),
)
