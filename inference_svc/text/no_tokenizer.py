"""Stands for the tokenizer of a server without one: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from inference_svc.text.answers.families import PLAIN
from inference_svc.text.chat import Chat
from inference_svc.text.cut import Kept
from inference_svc.text.pair import PairTokens
from inference_svc.text.pieces import Pieces
from servicekit.errors import InvalidArgument

NO_TOKENIZER = "this server has no tokenizer (--no-tokenizer)"


class NoTokenizer:
    """Refuses text, and makes none of tokens."""

    visible_ids: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()
    is_byte_level = False
    max_chars_per_token = 1
    renders_in_child = False
    end_ids: tuple[int, ...] = ()
    answers = PLAIN

    def __init__(self) -> None:
        self.pieces = Pieces(self)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidArgument."""
        raise InvalidArgument(f"prompt: {NO_TOKENIZER}: send token ids", subject="prompt")

    def encode_pair(self, first: str, second: str) -> PairTokens:
        """Raises InvalidArgument."""
        raise InvalidArgument(
            f"prompt: {NO_TOKENIZER}: use a server with a tokenizer", subject="prompt"
        )

    def shortened(self, text: str, num_fewer: int, kept: Kept) -> str:
        """Raises InvalidArgument."""
        raise InvalidArgument(
            f"prompt: {NO_TOKENIZER}: use a server with a tokenizer", subject="prompt"
        )

    def encode_chat(
        self, chat: Chat, max_chars: int, max_seconds: float, framed: Callable[[str], str] = str
    ) -> list[int]:
        """Raises InvalidArgument."""
        raise InvalidArgument(
            f"chat: {NO_TOKENIZER}, and so no chat template: send token ids", subject="chat"
        )

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidArgument."""
        raise InvalidArgument(
            f"tokens: {NO_TOKENIZER}: use a server with a tokenizer", subject="tokens"
        )

    def special_id(self, marker: str) -> int | None:
        return None

    def showing(self, markers: Iterable[str]) -> NoTokenizer:
        return self

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def name_of(self, token_id: int) -> str:
        return ""
