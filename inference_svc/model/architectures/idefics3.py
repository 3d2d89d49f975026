"""Idefics3 and SmolVLM: a tower of SigLIP's class, whose neighbouring patches one layer joins, and
Llama's decoder."""

from __future__ import annotations

from inference_svc.model.architectures import Family, describe_text_part
from inference_svc.model.architectures.towers.vit import describe_tower, read_vision, wrapper
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import (
    Connector,
    Decoder,
    Member,
    Pictures,
    Projection,
)

TOWER, CONNECTOR = "vision_model", "connector"
MAX_MERGE = 16
OF_TRAINERS = names("is_llama_config pixel_shuffle_factor perceiver_config")
"""Keys of `text_config` that the authors' own code has left in published files."""
WRAPPER = Wrapper(prefixes=(("model.text_model.", "model."),), others=(TOWER, CONNECTOR))
OF_TOWER = wrapper(TOWER, CONNECTOR, ("text_model", "lm_head"))


def describe(config: ConfigReader) -> Decoder:
    return describe_text_part(config, {"llama": "LlamaForCausalLM"}, WRAPPER, OF_TRAINERS)


def _pictures(config: ConfigReader, decoder: Decoder) -> Pictures:
    vision, kind = read_vision(config, ("idefics3_vision",))
    merge = config.within("scale_factor", 1, MAX_MERGE)
    size = vision.positive("hidden_size") * merge**2
    member = Member(f"{CONNECTOR}.modality_projection.proj", decoder.hidden_size)
    connector = Connector((Projection(CONNECTOR, (member,), size),))
    tower = describe_tower(
        vision,
        kind,
        connector,
        OF_TOWER,
        num_layers=vision.num_layers,
        merge=merge,
        has_last_norm=True,
    )
    return Pictures(tower, config.count("image_token_id"))


def _family(name: str) -> Family:
    return Family(
        f"{name}ForConditionalGeneration",
        describe,
        reads=names("text_config vision_config image_token_id scale_factor"),
        ignores=names("image_seq_len image_token_index"),
        defaults={
            "tie_word_embeddings": False,
            "eos_token_id": None,
            "image_token_id": 128257,
            "scale_factor": 2,
        },
        pictures=_pictures,
    )


FAMILIES = (_family("Idefics3"), _family("SmolVLM"))
