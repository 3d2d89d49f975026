"""A tokenizer's interface to the rest of the service."""

from __future__ import annotations

from typing import Protocol

from inference_svc.text.detokenizer import TokenDecoder
from inference_svc.text.pieces import Pieces, Vocabulary
from inference_svc.text.prompt import Encoder


class TextModel(Encoder, TokenDecoder, Vocabulary, Protocol):
    """Both directions of a tokenizer, and its tokens one by one. `end_ids` end an answer beside the
    model's."""

    @property
    def pieces(self) -> Pieces: ...
    @property
    def end_ids(self) -> tuple[int, ...]: ...
