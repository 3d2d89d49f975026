"""Converts prompts of every form to token ids, off the event loop when they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeGuard, cast

from servicekit.errors import InvalidArgument

INLINE_CHARS = 2000
"""Shorter texts are tokenised inline: a change of threads would cost more."""
TEMPLATE_CHARS = 20
"""About what a chat template adds to each message."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


class Encoder(Protocol):
    """The part of a tokenizer that encoding needs. May raise InvalidArgument."""

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]: ...


class PromptEncoder:
    """`max_model_len` bounds the prompt, with room for one token of output; `vocab_size` is the
    model's, which may know fewer tokens than its tokenizer."""

    def __init__(self, encoder: Encoder, max_model_len: int, vocab_size: int) -> None:
        self._encoder = encoder
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="loadout-tokenize")

    def close(self) -> None:
        self._executor.shutdown()

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Raises InvalidArgument for a prompt that is empty, too long, or refused by the chat
        template."""
        if _num_chars(prompt) <= INLINE_CHARS:
            token_ids = self._encode(prompt)
        else:
            loop = asyncio.get_running_loop()
            token_ids = await loop.run_in_executor(self._executor, self._encode, prompt)
        if not token_ids:
            raise InvalidArgument("prompt must have at least one token", subject="prompt")
        if len(token_ids) >= self._max_model_len:
            raise InvalidArgument(
                f"prompt has {len(token_ids)} tokens; at most {self._max_model_len - 1} leave "
                f"room for an answer",
                subject="prompt",
            )
        if max(token_ids) >= self._vocab_size:
            raise InvalidArgument(
                f"prompt has token {max(token_ids)}; this model knows {self._vocab_size}",
                subject="prompt",
            )
        return token_ids

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._encoder.encode(prompt))
        if _is_chat(prompt):
            return tuple(self._encoder.encode_chat(prompt))
        return cast("tuple[int, ...]", prompt)


def _is_chat(
    prompt: tuple[int, ...] | tuple[ChatMessage, ...],
) -> TypeGuard[tuple[ChatMessage, ...]]:
    return bool(prompt) and isinstance(prompt[0], ChatMessage)


def _num_chars(prompt: Prompt) -> int:
    """Returns the length to tokenise; an empty message still has what the template adds."""
    if isinstance(prompt, str):
        return len(prompt)
    if _is_chat(prompt):
        return sum(len(m.role) + len(m.content) + TEMPLATE_CHARS for m in prompt)
    return 0
