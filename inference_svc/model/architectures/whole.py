"""Models of several towers: the server reads and serves only the text part. Checkpoint and
adapters may use any of transformers' names for the text part's modules. The server does not apply
an adapter's changes to other towers; the verdict lists this."""

from inference_svc.model.architectures import Family, describe_text_part
from inference_svc.model.architectures.llava import WRAPPER
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder

_GEMMA4 = WRAPPER._replace(others=("vision_tower", "audio_tower", "embed_vision", "embed_audio"))


def describe_gemma4(config: ConfigReader) -> Decoder:
    return describe_text_part(config, {"gemma4_text": "Gemma4ForCausalLM"}, _GEMMA4)


_IGNORES = names(
    """
    vision_config image_token_index image_token_id boi_token_index boi_token_id eoi_token_index
    eoi_token_id mm_tokens_per_image projector_hidden_act vision_feature_layer
    multimodal_projector_bias spatial_merge_size
    """
)
_DEFAULTS = {"tie_word_embeddings": True, "eos_token_id": None}

FAMILIES = (
    Family(
        "Gemma4ForConditionalGeneration",
        describe_gemma4,
        reads=names("text_config"),
        ignores=_IGNORES
        | names(
            """
            audio_config video_token_id audio_token_id boa_token_id eoa_token_id eoa_token_index
            vision_soft_tokens_per_image
            """
        ),
        defaults=_DEFAULTS,
    ),
)
