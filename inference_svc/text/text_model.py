"""A tokenizer's interface to the rest of the service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from inference_svc.text.answers.families import AnswerSyntax
from inference_svc.text.detokenizer import TokenDecoder
from inference_svc.text.encoder import Encoder
from inference_svc.text.pieces import Pieces, Vocabulary


class TextModel(Encoder, TokenDecoder, Vocabulary, Protocol):
    """Both directions of a tokenizer, and its tokens one by one. `end_ids` end an answer beside the
    model's."""

    @property
    def pieces(self) -> Pieces: ...
    @property
    def end_ids(self) -> tuple[int, ...]: ...
    @property
    def answers(self) -> AnswerSyntax:
        """How its answers are read."""
        ...

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with special ones."""
        ...

    def special_id(self, marker: str) -> int | None:
        """Returns the id of a special token; None for a text that is none."""
        ...

    def showing(self, markers: Iterable[str]) -> TokenDecoder:
        """Returns a decoder that shows these special tokens, too."""
        ...
