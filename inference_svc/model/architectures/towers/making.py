"""Makes the description of a tower, of the parts that towers have."""

from __future__ import annotations

from typing import Any

from inference_svc.model.checkpoint.wrapper import Wrapper
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
