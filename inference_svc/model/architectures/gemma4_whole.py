"""Gemma 4 with images: a tower of its own, whose pooled patches one layer makes embeddings of, and
Gemma 4's decoder. Sounds and videos are refused: the server leaves the audio tower out."""

from __future__ import annotations

from collections.abc import Mapping

from inference_svc.model.architectures import Family, describe_text_part
from inference_svc.model.architectures.gemma4 import MUTUAL
from inference_svc.model.architectures.llava import WRAPPER
from inference_svc.model.architectures.towers.gemma4 import CONNECTOR, describe_tower
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder, Pictures
from inference_svc.pictures.prompt import Frame

_WRAPPER = WRAPPER._replace(others=("vision_tower", "audio_tower", CONNECTOR, "embed_audio"))


def describe(config: ConfigReader) -> Decoder:
    return describe_text_part(config, {"gemma4_text": "Gemma4ForCausalLM"}, _WRAPPER)


def _pictures(config: ConfigReader, decoder: Decoder) -> Pictures:
    tower = describe_tower(config, decoder.hidden_size)
    begin, end = (
        config.count(config.name_of(f"{name}_token_id", f"{name}_token_index"))
        for name in ("boi", "eoi")
    )
    text = config.get("text_config")
    assert isinstance(text, Mapping), "it is described"
    padding = text.get("pad_token_id", 0)
    if type(padding) is not int or not 0 <= padding < decoder.vocab_size:
        reason = f"must be a token of the {decoder.vocab_size}"
        raise config.unsupported("text_config.pad_token_id", reason, padding)
    return Pictures(
        tower,
        config.count(config.name_of("image_token_id", "image_token_index")),
        are_mutual=text.get(MUTUAL) is not None,
        frame=Frame(begin, end, replaces_begin=False),
        padding_id=padding,
    )


FAMILIES = (
    Family(
        "Gemma4ForConditionalGeneration",
        describe,
        reads=names(
            """
            text_config vision_config image_token_id image_token_index boi_token_id boi_token_index
            eoi_token_id eoi_token_index
            """
        ),
        ignores=names(
            """
            audio_config video_token_id audio_token_id boa_token_id eoa_token_id eoa_token_index
            vision_soft_tokens_per_image
            """
        ),
        defaults={
            "tie_word_embeddings": True,
            "eos_token_id": None,
            "image_token_id": 258_880,
            "boi_token_id": 255_999,
            "eoi_token_id": 258_882,
            "video_token_id": 258_884,
            "audio_token_id": 258_881,
        },
        pictures=_pictures,
    ),
)
