"""Converts prompts of every form to token ids, off the event loop when they are long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeGuard, cast

from inference_svc.errors import TemplateTimeout
from servicekit.errors import InvalidArgument
from servicekit.shares import FairExecutor, Shares
from servicekit.work_budget import WorkBudget

INLINE_CHARS = 2000
"""Shorter texts are tokenised inline: a change of threads would cost more."""
TEMPLATE_CHARS = 20
"""About what a chat template adds to each message."""
NUM_THREADS = 2
INLINE_SECONDS, TEMPLATE_SECONDS = 0.05, 2.0
"""How long a chat template may take on the event loop, and in a thread."""
INLINE_RETRY_SECONDS = 60.0
"""How long all chats are rendered in a thread after one took too long on the event loop."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


class Encoder(Protocol):
    """The part of a tokenizer that encoding needs. May raise InvalidArgument."""

    @property
    def max_chars_per_token(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_chat(
        self, messages: Sequence[ChatMessage], max_chars: int, max_seconds: float
    ) -> list[int]:
        """Raises TemplateTimeout if the messages' text is not there in time."""
        ...


class PromptEncoder:
    """`max_model_len` bounds the prompt, with room for one token of output; `vocab_size` is the
    model's, which may know fewer tokens than its tokenizer. With a `share` below 1 accounts take
    turns, and none has all threads. What a prompt took that is refused is charged to `work`."""

    def __init__(
        self,
        encoder: Encoder,
        max_model_len: int,
        vocab_size: int,
        work: WorkBudget,
        share: float = 1.0,
    ) -> None:
        self._encoder = encoder
        self._max_model_len = max_model_len
        self._max_chars = max_model_len * encoder.max_chars_per_token
        self._vocab_size = vocab_size
        self._work = work
        self._inline_from_s = 0.0
        self._threads = FairExecutor(NUM_THREADS, "prompts", share)

    def close(self) -> None:
        self._threads.close()

    @property
    def threads(self) -> Shares:
        return self._threads.shares

    def threads_of(self, account: str) -> Executor:
        """Returns an account's executor for what else is long before its prompts are tokenised."""
        return self._threads.of(account)

    async def encode(self, prompt: Prompt, account: str = "") -> tuple[int, ...]:
        """Raises InvalidArgument for a prompt that is empty, too long, or refused by the chat
        template, ShareExceeded if too many prompts of the account wait."""
        if isinstance(prompt, str) or is_chat(prompt):
            return await self._encode_in_time(prompt, account)
        token_ids = cast("tuple[int, ...]", prompt)
        self._check(token_ids)
        return token_ids

    def _check(self, token_ids: tuple[int, ...]) -> None:
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

    async def _encode_in_time(
        self, prompt: str | tuple[ChatMessage, ...], account: str
    ) -> tuple[int, ...]:
        num_chars = _num_chars(prompt)
        if num_chars > INLINE_CHARS:
            self._check_fits(prompt)
        elif isinstance(prompt, str) or time.monotonic() >= self._inline_from_s:
            try:
                return self._encode(prompt, account, INLINE_SECONDS)
            except TemplateTimeout as error:
                # Nor is any other chat rendered here for a while: they would hold up the loop.
                self._inline_from_s = time.monotonic() + INLINE_RETRY_SECONDS
                logger.warning("chats are rendered in a thread", extra={"why": error.message})
        encoding = self._threads.submit(account, self._encode, prompt, account, TEMPLATE_SECONDS)
        return await asyncio.wrap_future(encoding)

    def _check_fits(self, prompt: str | tuple[ChatMessage, ...]) -> None:
        """Raises InvalidArgument for a text that has too many tokens, however it is cut."""
        if is_chat(prompt) and len(prompt) > self._max_model_len:
            raise InvalidArgument(
                f"prompt has {len(prompt)} messages; the {self._max_model_len} tokens of this "
                f"model's context hold fewer",
                subject="prompt",
            )
        num_chars = len(prompt) if isinstance(prompt, str) else sum(len(m.content) for m in prompt)
        if num_chars > self._max_chars:
            raise InvalidArgument(
                f"prompt has {num_chars} characters; the {self._max_model_len} tokens of this "
                f"model's context are at most {self._max_chars}",
                subject="prompt",
            )

    def _encode(
        self, prompt: str | tuple[ChatMessage, ...], account: str, max_seconds: float
    ) -> tuple[int, ...]:
        start_s = time.thread_time()
        try:
            if isinstance(prompt, str):
                token_ids = self._encoder.encode(prompt)
            else:
                max_chars = self._max_chars + INLINE_CHARS
                token_ids = self._encoder.encode_chat(prompt, max_chars, max_seconds)
            found = tuple(token_ids)
            self._check(found)
        except InvalidArgument:
            self._work.charge(account, time.thread_time() - start_s)
            raise
        return found


def is_chat(prompt: Prompt) -> TypeGuard[tuple[ChatMessage, ...]]:
    return bool(prompt) and isinstance(prompt[0], ChatMessage)


def _num_chars(prompt: Prompt) -> int:
    """Returns the length to tokenise; an empty message still has what the template adds."""
    if isinstance(prompt, str):
        return len(prompt)
    if is_chat(prompt):
        return sum(len(m.role) + len(m.content) + TEMPLATE_CHARS for m in prompt)
    return 0
