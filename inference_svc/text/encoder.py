"""The part of a tokenizer that encodes prompts, and the terms that a call's prompts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from inference_svc.text.chat import Chat
from inference_svc.text.cut import NO_LIMIT, Kept, PromptLimit
from inference_svc.text.pair import PairTokens


class Encoder(Protocol):
    """The part of a tokenizer that encoding needs. May raise InvalidArgument."""

    @property
    def max_chars_per_token(self) -> int: ...
    @property
    def renders_in_child(self) -> bool:
        """Whether its chats wait for a child process."""
        ...

    def name_of(self, token_id: int) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def encode_pair(self, first: str, second: str) -> PairTokens: ...
    def shortened(self, text: str, num_fewer: int, kept: Kept) -> str:
        """Returns the text of all but so many of a text's tokens; "" if there are no others."""
        ...

    def encode_chat(
        self, chat: Chat, max_chars: int, max_seconds: float, framed: Callable[[str], str] = str
    ) -> list[int]:
        """Raises TemplateTimeout if the messages' text is not there in time."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """The parts that the prompts of a call share: the account that pays, an adapter's own encoder
    if it has one, its rows for so many tokens behind the model's, the tokens of an answer that
    each prompt leaves room for, and a `limit` that says whether longer prompts are cut."""

    account: str = ""
    encoder: Encoder | None = None
    num_added_tokens: int = 0
    num_answer_tokens: int = 1
    limit: PromptLimit = NO_LIMIT


NO_TERMS = Terms()
