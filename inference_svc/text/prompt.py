"""Converts prompts of every form to token ids, off the event loop when they are long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from inference_svc.errors import AdapterUnusable, TemplateTimeout
from inference_svc.pictures.decoding import Tiles
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.text.chat import Chat
from inference_svc.text.cut import KEPT_TIMES, NO_LIMIT, WHOLE_TIMES, PromptLimit
from inference_svc.text.encoder import NO_TERMS, Encoder, Terms
from inference_svc.text.pair import Encoded, Pair
from servicekit.errors import InvalidArgument
from servicekit.shares import FairExecutor, Shares
from servicekit.work_budget import WorkBudget

INLINE_CHARS = 2000
"""Shorter texts are tokenised inline: a change of threads would cost more."""
GROUP_CHARS = 8000
"""Texts of a call with so many characters are tokenised with one change of threads: it takes some
milliseconds, and as many changes would double them."""
MIN_CHARS, SHORT_CHARS = 20, 200
"""The tokenising of any text takes at least about as long as of the first; up to the second, it is
quicker than a change of threads however many texts a call has."""
MAX_CUTS = 4
"""How often the document of a question is cut until its chat fits."""
NUM_THREADS = 2
INLINE_SECONDS, TEMPLATE_SECONDS = 0.05, 2.0
"""How long a chat template may take on the event loop, and in a thread."""
INLINE_RETRY_SECONDS = 60.0
"""How long all chats are rendered in a thread after one took too long on the event loop."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    add_special_tokens: bool = True
    """Whether the tokenizer adds those with which texts begin or end."""


@dataclass(frozen=True, slots=True)
class Question:
    """A chat about a document, which alone is cut if the chat is too long."""

    document: str
    ask: Callable[[str], Chat]
    """Returns the chat about a document, or about a part of it."""

    @property
    def chat(self) -> Chat:
        return self.ask(self.document)


Prompt = Text | tuple[int, ...] | Chat | Pair | Question
Texts = Text | Chat | Pair | Question
Refused = InvalidArgument | AdapterUnusable


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The encoder of a prompt, the ids below which a token has a row in the model's tables, the
    tokens of an answer that a prompt leaves room for, and the call's own limit."""

    encoder: Encoder
    vocab_size: int
    num_answer_tokens: int = 1
    limit: PromptLimit = NO_LIMIT


class PromptPictures(Protocol):
    """The pictures of a prompt. `read` raises InvalidArgument and ShareExceeded."""

    @property
    def num_pictures(self) -> int: ...
    async def read(self) -> Sequence[Tiles]: ...


class PromptEncoder:
    """`max_model_len` bounds prompts, with room for an answer; `vocab_size` is the model's, which
    may know fewer tokens than its tokenizer. `picture_rule` is of a model that reads pictures;
    `placeholder_ids` of other parts are refused. With a `share` below 1 accounts take turns, and
    none has all threads. The time of a refused prompt is charged to `work`."""

    def __init__(
        self,
        encoder: Encoder,
        max_model_len: int,
        vocab_size: int,
        work: WorkBudget,
        share: float = 1.0,
        picture_rule: PictureRule | None = None,
        placeholder_ids: tuple[int, ...] = (),
    ) -> None:
        self.picture_rule = picture_rule
        of_pictures = () if picture_rule is None else (picture_rule.token_id,)
        self._refused_ids = frozenset(placeholder_ids).difference(of_pictures)
        self._base = TextLimits(encoder, vocab_size)
        self._max_model_len = max_model_len
        self._work = work
        self._inline_from_s = 0.0
        self._threads = FairExecutor(NUM_THREADS, "prompts", share)

    def close(self) -> None:
        self._threads.close()

    @property
    def threads(self) -> Shares:
        return self._threads.shares

    def threads_of(self, account: str) -> Executor:
        """Returns an account's executor for other long work before its prompts are tokenised."""
        return self._threads.of(account)

    async def encode(
        self,
        prompt: Prompt,
        terms: Terms = NO_TERMS,
        num_chars_before: int = 0,
        pictures: PromptPictures | None = None,
    ) -> Encoded:
        """Encodes a prompt. The earlier prompts of its call have `num_chars_before`: many hold up
        the loop as a long one does. A chat's `pictures`, which have all of their tokens, are read
        once the text is known to have room for them.

        Raises InvalidArgument for a prompt that is empty, too long, or refused by the chat
        template, ShareExceeded if too many prompts of the account wait, and errors of the
        encoder."""
        text = _limits(self._base, terms)
        if isinstance(prompt, tuple):
            found = Encoded(terms.limit.cut(prompt, self._most_tokens(text)))
            self._check(found.token_ids, text)
        else:
            found = await self._encode_in_time(prompt, terms.account, text, num_chars_before)
        rule = self.picture_rule
        self._check_words(found.token_ids, text)
        if rule is None:
            return found
        expanded = await self._with_pictures(found.token_ids, text, rule, pictures)
        return found._replace(token_ids=expanded)

    async def encode_next(
        self,
        prompts: Sequence[Prompt],
        index: int,
        terms: Terms = NO_TERMS,
        num_chars_before: int = 0,
        pictures: PromptPictures | None = None,
    ) -> list[Encoded | Refused]:
        """Encodes the prompt of a call with this index, as `encode`, and perhaps some texts behind
        it, of which the last may be refused: its error is there in its place. Raises like `encode`
        for the first."""
        prompt = prompts[index]
        if self.picture_rule is not None or not _is_one_of_many(prompt, num_chars_before):
            return [await self.encode(prompt, terms, num_chars_before, pictures)]
        text = _limits(self._base, terms)
        encode = partial(self._encode_group, prompts, index, terms.account, text)
        return await self._in_thread(encode, terms.account, text)

    def _encode_group(
        self, prompts: Sequence[Prompt], index: int, account: str, text: TextLimits
    ) -> list[Encoded | Refused]:
        found: list[Encoded | Refused] = []
        num_chars = 0
        for place in range(index, len(prompts)):
            prompt = prompts[place]
            num_chars += num_chars_of(prompt)
            if found and (not _is_one_of_many(prompt, INLINE_CHARS) or num_chars > GROUP_CHARS):
                break
            assert isinstance(prompt, Text | Pair)
            try:
                encoded = self._encode(prompt, account, text, TEMPLATE_SECONDS)
                self._check_words(encoded.token_ids, text)
            except (InvalidArgument, AdapterUnusable) as error:
                if not found:
                    raise
                found.append(error)
                break
            found.append(encoded)
        return found

    async def _with_pictures(
        self,
        found: tuple[int, ...],
        text: TextLimits,
        rule: PictureRule,
        pictures: PromptPictures | None,
    ) -> tuple[int, ...]:
        """Returns a prompt with all tokens of its pictures, which are read if they may fit."""
        encode = partial(text.encoder.encode, add_special_tokens=False)
        name_of = text.encoder.name_of
        num_pictures = 0 if pictures is None else pictures.num_pictures
        rule.check(found, num_pictures, name_of)
        self._check_length(len(found) + num_pictures * (rule.min_tokens - 1), text)
        tiles = () if pictures is None else await pictures.read()
        num_tokens = sum(map(rule.num_tokens, tiles))  # before they take memory
        self._check_length(len(found) - num_pictures + num_tokens, text)
        expanded = rule.expanded(found, tiles, name_of(rule.token_id), encode)
        self._check(expanded, text)
        return expanded

    @property
    def vocab_size(self) -> int:
        return self._base.vocab_size

    def max_chars(self, encoder: Encoder) -> int:
        """Returns the length of the longest text that fits into the context, however it is cut."""
        return self._max_model_len * encoder.max_chars_per_token

    def _most_tokens(self, text: TextLimits) -> int:
        """Returns how many tokens a prompt may have."""
        most = self._max_model_len - text.num_answer_tokens
        return min(most, text.limit.max_tokens or most)

    def _encode_text(self, prompt: Text, text: TextLimits) -> list[int]:
        """Returns a text's tokens, cut if they may be. Raises InvalidArgument."""
        shorter = replace(prompt, text=self._with_fewer_chars(prompt.text, text))
        token_ids = _tokens_of(shorter, text)
        if shorter != prompt and len(token_ids) < self._most_tokens(text):
            self._check_whole(prompt.text, shorter.text, len(token_ids), "prompt", text)
            shorter, token_ids = prompt, _tokens_of(prompt, text)
        return self._cut(shorter, token_ids, text)

    def _check_whole(
        self, given: str, shorter: str, num_tokens: int, field: str, text: TextLimits
    ) -> None:
        """Raises InvalidArgument for a text that is too long to be tokenised whole, though the
        characters at its kept end have too few tokens. Tokenizers leave out white space, or have
        one token for a long word that they do not know: the characters beyond have tokens that are
        kept."""
        most_chars = WHOLE_TIMES * self.max_chars(text.encoder)
        if len(given) > most_chars:
            raise InvalidArgument(
                f"{field} has {len(given)} characters, and the {len(shorter)} at its kept end are "
                f"{num_tokens} tokens: the server cuts no longer text than of {most_chars} to "
                f"{self._most_tokens(text)}; leave out white space and words that the tokenizer "
                "does not know",
                subject=field,
            )

    def _with_fewer_chars(self, given: str, text: TextLimits) -> str:
        """Returns a text that is to be cut, without characters that none of the tokens that are
        kept can have, unless the tokenizer leaves out others."""
        if text.limit.kept is None:
            return given
        num_chars = KEPT_TIMES * self._most_tokens(text) * text.encoder.max_chars_per_token
        return text.limit.kept.text(given, num_chars)

    def _encode_pair(self, prompt: Pair, text: TextLimits) -> Encoded:
        """Returns a pair's tokens, cut if they may be. Raises InvalidArgument."""
        both, most = (prompt.first, prompt.second), self._most_tokens(text)
        fewer = tuple(self._with_fewer_chars(each, text) for each in both)
        made = text.encoder.encode_pair(*fewer)
        places, texts = range(len(both)), list(fewer)
        for at, given, short, field in zip(places, both, fewer, prompt.fields, strict=True):
            if short != given and (count := made.texts.count(at)) < most:
                self._check_whole(given, short, count, field, text)
                texts[at] = given
        if texts != list(fewer):
            made = text.encoder.encode_pair(*texts)
        return made.encoded(most, text.limit.kept)

    def _encode_question(
        self, prompt: Question, text: TextLimits, max_chars: int, max_seconds: float
    ) -> list[int]:
        """Returns the tokens of a chat whose document is cut until they fit: tokens at its end may
        be others than in the whole. Raises InvalidArgument."""
        given, kept = prompt.document, text.limit.kept
        assert kept is not None, "a question is made of a document that may be cut"
        document, most, num_more = self._with_fewer_chars(given, text), self._most_tokens(text), 0

        def encode(document: str) -> list[int]:
            return text.encoder.encode_chat(
                prompt.ask(document), max_chars + len(document), max_seconds
            )

        token_ids = encode(document)
        if document != given and len(token_ids) < most:
            self._check_whole(given, document, len(token_ids), "prompt", text)
            document, token_ids = given, encode(given)
        for _ in range(MAX_CUTS):
            num_more = len(token_ids) - most
            if num_more <= 0:
                return token_ids
            document = text.encoder.shortened(document, num_more, kept)
            if not document:
                break
            token_ids = encode(document)
        raise InvalidArgument(
            f"prompt has {num_more} tokens more than the {most} that {text.limit.why} if its "
            "document is cut: shorten the query or the instruction",
            subject="prompt",
        )

    def _cut(self, prompt: Text, token_ids: list[int], text: TextLimits) -> list[int]:
        """Returns a text's tokens, cut to as many as may be: the tokenizer's own stay where they
        are, as tokenizers cut."""
        most = self._most_tokens(text)
        if text.limit.kept is None or len(token_ids) <= most:
            return token_ids
        own = text.encoder.encode(prompt.text, add_special_tokens=False)
        num_added = len(token_ids) - len(own)
        places = range(num_added + 1 if num_added > 0 else 0)
        start = next((at for at in places if token_ids[at : at + len(own)] == own), None)
        if start is None or num_added > most:
            return list(text.limit.cut(tuple(token_ids), most))
        kept = text.limit.cut(tuple(own), most - num_added)
        return [*token_ids[:start], *kept, *token_ids[start + len(own) :]]

    def _check(self, token_ids: tuple[int, ...], text: TextLimits) -> None:
        if not token_ids:
            raise InvalidArgument("prompt must have at least one token", subject="prompt")
        self._check_length(len(token_ids), text)
        if (highest := max(token_ids)) >= text.vocab_size:
            # The tokenizer's ids have 32 bits.
            name = text.encoder.name_of(highest) if highest < 1 << 32 else ""
            shown = f" ({name!a})" if name else ""
            raise InvalidArgument(
                f"there is no token {highest}{shown}; this model knows {text.vocab_size} tokens",
                subject="prompt",
            )

    def _check_length(self, num_tokens: int, text: TextLimits) -> None:
        most = self._most_tokens(text)
        if num_tokens > most:
            why = "leave room for an answer" if text.num_answer_tokens else text.limit.why
            raise InvalidArgument(
                f"prompt has {num_tokens} tokens; at most {most} {why}", subject="prompt"
            )

    def _check_words(self, token_ids: tuple[int, ...], text: TextLimits) -> None:
        """Raises InvalidArgument for tokens that stand for parts which this server does not
        read."""
        found = self._refused_ids.intersection(token_ids) if self._refused_ids else None
        if not found:
            return
        token_id = min(found)
        said = "an image, a video or a sound: this server reads text alone"
        if self.picture_rule is not None:
            said = "a video or a sound: this server reads texts and images"
        name = text.encoder.name_of(token_id)
        raise InvalidArgument(
            f"prompt has the token {token_id} ({name!a}), which stands for {said}", subject="prompt"
        )

    async def _encode_in_time(
        self, prompt: Texts, account: str, text: TextLimits, num_chars_before: int
    ) -> Encoded:
        num_chars = num_chars_of(prompt)
        if num_chars_before > INLINE_CHARS:
            await asyncio.sleep(0)
        if num_chars > INLINE_CHARS:
            if text.limit.kept is None:
                self._check_fits(prompt, text)
        elif num_chars > SHORT_CHARS and num_chars_before + num_chars > INLINE_CHARS:
            pass  # one of many
        elif isinstance(prompt, Chat | Question) and text.encoder.renders_in_child:
            pass
        elif isinstance(prompt, Text | Pair) or time.monotonic() >= self._inline_from_s:
            try:
                return self._encode(prompt, account, text, INLINE_SECONDS)
            except TemplateTimeout as error:
                # Nor is any other chat rendered here for a while: they would hold up the loop.
                self._inline_from_s = time.monotonic() + INLINE_RETRY_SECONDS
                logger.warning("chats are rendered in a thread", extra={"why": error.message})
        encode = partial(self._encode, prompt, account, text, TEMPLATE_SECONDS)
        return await self._in_thread(encode, account, text)

    async def _in_thread(self, encode: Callable[[], T], account: str, text: TextLimits) -> T:
        if text.encoder.renders_in_child:
            await self._work.wait(account)  # until its debt for costly templates is paid
        return await asyncio.wrap_future(self._threads.submit(account, encode))

    def _check_fits(self, prompt: Texts, text: TextLimits) -> None:
        """Raises InvalidArgument for a text that has too many tokens, however it is cut."""
        assert not isinstance(prompt, Question), "its document may be cut"
        if isinstance(prompt, Pair):
            texts = [prompt.first, prompt.second]
        elif isinstance(prompt, Text):
            texts = [prompt.text]
        else:
            texts = [m.content for m in prompt.messages]
        if isinstance(prompt, Chat) and len(texts) > self._max_model_len:
            raise InvalidArgument(
                f"prompt has {len(texts)} messages, more than fit into this model's context of "
                f"{self._max_model_len} tokens",
                subject="prompt",
            )
        num_chars = sum(map(len, texts))
        if num_chars > self.max_chars(text.encoder):
            raise InvalidArgument(
                f"prompt has {num_chars} characters; this model's context of "
                f"{self._max_model_len} tokens holds at most {self.max_chars(text.encoder)}",
                subject="prompt",
            )

    def _encode(
        self,
        prompt: Texts,
        account: str,
        text: TextLimits,
        max_seconds: float,
    ) -> Encoded:
        # A child process's time is not this thread's.
        clock = time.monotonic if text.encoder.renders_in_child else time.thread_time
        start_s = clock()
        try:
            if isinstance(prompt, Pair):
                found = self._encode_pair(prompt, text)
            elif isinstance(prompt, Text):
                found = Encoded(tuple(self._encode_text(prompt, text)))
            else:
                found = Encoded(tuple(self._encode_chat(prompt, text, max_seconds)))
            self._check(found.token_ids, text)
        except (InvalidArgument, AdapterUnusable):
            self._work.charge(account, clock() - start_s)
            raise
        return found

    def _encode_chat(
        self, prompt: Chat | Question, text: TextLimits, max_seconds: float
    ) -> list[int]:
        # An adapter's tokens may be long, which is no reason for a longer template.
        of_base = self.max_chars(self._base.encoder) + num_chars_of(prompt)
        max_chars = min(self.max_chars(text.encoder), of_base) + INLINE_CHARS
        if isinstance(prompt, Question):
            return self._encode_question(prompt, text, max_chars, max_seconds)
        framed = _framed_by(self.picture_rule, text.encoder)
        return text.encoder.encode_chat(prompt, max_chars, max_seconds, framed)


def _limits(base: TextLimits, terms: Terms) -> TextLimits:
    return TextLimits(
        terms.encoder or base.encoder,
        base.vocab_size + terms.num_added_tokens,
        terms.num_answer_tokens,
        terms.limit,
    )


def _framed_by(rule: PictureRule | None, encoder: Encoder) -> Callable[[str], str]:
    """Returns the function that puts frames around the pictures of a conversation's text."""
    return str if rule is None else partial(rule.framed, name_of=encoder.name_of)


def _is_one_of_many(prompt: Prompt, num_chars_before: int) -> bool:
    """Returns whether a text is tokenised in a thread only because of those before it."""
    num_chars = num_chars_of(prompt)
    is_text = isinstance(prompt, Text | Pair) and SHORT_CHARS < num_chars <= INLINE_CHARS
    return is_text and num_chars_before + num_chars > INLINE_CHARS


def _tokens_of(prompt: Text, text: TextLimits) -> list[int]:
    return text.encoder.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)


def num_chars_of(prompt: Prompt) -> int:
    """Returns the length to tokenise; an empty message still has the template's additions."""
    if isinstance(prompt, tuple):
        return 0
    if isinstance(prompt, Pair):
        return len(prompt.first) + len(prompt.second)
    if isinstance(prompt, Question):
        prompt = prompt.chat
    return len(prompt.text) if isinstance(prompt, Text) else prompt.num_chars
