"""Reads the config of a tower, and makes its description of the parts that towers have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.config.keys import check_keys
from inference_svc.model.config.reader import ConfigReader
from inference_svc.model.description import (
    Block,
    Connector,
    Decoder,
    EncoderInputs,
    Head,
    Norm,
    Patches,
)
from inference_svc.pictures.sizes import MAX_SLICE


def read_vision(
    config: ConfigReader,
    model_type: str,
    reads: Collection[str],
    ignores: Collection[str],
    defaults: Mapping[str, Any],
    where: str,
) -> ConfigReader:
    """Returns the reader of `vision_config`, which must be of this type and have no other keys.
    Raises UnsupportedModel."""
    values = config.get("vision_config")
    if not isinstance(values, Mapping):
        raise config.unsupported("vision_config", "must describe the vision tower")
    name = values.get("model_type") or model_type
    if name != model_type:
        reason = f"supported is {model_type}; --max-prompt-images 0 serves the text alone"
        raise config.unsupported("vision_config.model_type", reason, name)
    check_keys(values, model_type, reads, ignores, {}, where)
    return ConfigReader(values, defaults, where)


def make_tower(
    width: int,
    blocks: tuple[Block, ...],
    inputs: EncoderInputs,
    patches: Patches,
    connector: Connector,
    wrapper: Wrapper,
    *,
    final_norm: Norm | None = None,
    most_tokens: int = MAX_SLICE,
    **changes: Any,
) -> Decoder:
    """Returns a tower whose stream has this `width`, and which computes at most `most_tokens` at
    once; `changes` are of Decoder. It has neither words nor a head."""
    return Decoder(
        architecture="",
        config_sha256="",
        dtype="",
        vocab_size=0,
        hidden_size=width,
        max_position_embeddings=most_tokens,
        blocks=blocks,
        final_norm=final_norm,
        head=Head(is_tied=False),
        generates=False,
        wrapper=wrapper,
        encoder=inputs,
        patches=patches,
        connector=connector,
        **changes,
    )
