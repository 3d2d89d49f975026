"""Qwen 2 VL, 2.5 VL, 3 VL, also with mixtures of experts, and the whole models of Qwen 3.5: a tower
that reads pictures of any size, and a text part whose heads turn by the rows and columns of
pictures, too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from inference_svc.model.architectures import Family, describe_text_part
from inference_svc.model.architectures.qwen import OF_QWEN2_VL, OF_QWEN3_VL, OF_QWEN3_VL_MOE
from inference_svc.model.architectures.towers import qwen as towers
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import names
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import Decoder, Pictures
from inference_svc.model.rope import Axes

WRAPPER = Wrapper(
    prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    others=("visual", "mtp"),
)
_OF_WHOLE = names(
    """
    vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
    vision_token_id model_type architectures
    """
)
"""Keys that describe no text part, where its keys lie beside them."""


def _describe_qwen2(config: ConfigReader, model_type: str) -> Decoder:
    """Published files have the text part's keys beside those of the whole."""
    text = config.get("text_config")
    if text is None:
        text = {key: each for key, each in config.given.items() if key not in _OF_WHOLE}
        config = config.with_values(text_config=text)
    if isinstance(text, Mapping) and text.get("tie_word_embeddings") is True:
        config = config.with_values(tie_word_embeddings=True)
    return _describe(config, {model_type: OF_QWEN2_VL})


def _describe(config: ConfigReader, parts: Mapping[str, str | Family]) -> Decoder:
    return describe_text_part(config, parts, WRAPPER)


def _pictures(config: ConfigReader, decoder: Decoder, kind: towers.Kind, axes: Axes) -> Pictures:
    """Describes how the decoder reads pictures. `axes` are transformers' default."""
    tower = towers.describe_tower(config, kind)
    axes = axes._replace(sections=_sections(config, axes.sections))
    return Pictures(tower, config.count("image_token_id"), axes)


def _sections(config: ConfigReader, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many pairs of a head turn by each axis."""
    text = config.get("text_config") or config.given
    found = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = found.get("mrope_section", list(default))
    is_list = isinstance(sections, list) and len(sections) == len(default)
    if not is_list or not all(type(each) is int and each > 0 for each in sections):
        reason = f"must be {len(default)} numbers above 0"
        raise config.unsupported("text_config: mrope_section", reason, sections)
    return tuple(sections)


_READS = names("text_config vision_config image_token_id video_token_id")
_IGNORES = names(
    """
    vision_start_token_id vision_end_token_id vision_token_id language_model_only
    """
)
_DEFAULTS: dict[str, Any] = {
    "eos_token_id": None,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
_DEFAULTS_3_5 = {"image_token_id": 248056, "video_token_id": 248057}
_AXES_3 = Axes((24, 20, 20), interleaved=True)
_AXES_3_5 = Axes((11, 11, 10), interleaved=True)


def _qwen2_family(name: str, kind: towers.Kind) -> Family:
    """`name` is such as "Qwen2VL"."""
    model_type = {"Qwen2VL": "qwen2_vl_text", "Qwen2_5_VL": "qwen2_5_vl_text"}[name]
    return Family(
        f"{name}ForConditionalGeneration",
        partial(_describe_qwen2, model_type=model_type),
        reads=_READS | OF_QWEN2_VL.reads,
        ignores=_IGNORES,
        defaults=_DEFAULTS,
        pictures=partial(_pictures, kind=kind, axes=Axes((16, 24, 24))),
    )


def _family(
    name: str, kind: towers.Kind, parts: Mapping[str, str | Family], axes: Axes, **defaults: Any
) -> Family:
    return Family(
        f"{name}ForConditionalGeneration",
        partial(_describe, parts=parts),
        reads=_READS,
        ignores=_IGNORES,
        defaults=_DEFAULTS | defaults,
        pictures=partial(_pictures, kind=kind, axes=axes),
    )


_OF_3_5, _OF_3_5_MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
FAMILIES = (
    _qwen2_family("Qwen2VL", towers.QWEN2),
    _qwen2_family("Qwen2_5_VL", towers.QWEN2_5),
    _family("Qwen3VL", towers.QWEN3, {"qwen3_vl_text": OF_QWEN3_VL}, _AXES_3),
    _family("Qwen3VLMoe", towers.QWEN3, {"qwen3_vl_moe_text": OF_QWEN3_VL_MOE}, _AXES_3),
    _family("Qwen3_5", towers.QWEN3_5, {"qwen3_5_text": _OF_3_5}, _AXES_3_5, **_DEFAULTS_3_5),
    _family(
        "Qwen3_5Moe",
        towers.QWEN3_5,
        {"qwen3_5_moe_text": _OF_3_5_MOE},
        _AXES_3_5,
        **_DEFAULTS_3_5,
    ),
)
