import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from inference_svc.errors import TemplateTimeout
from inference_svc.pictures.decoding import Tiles
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.pictures.processor import HALF, Form, Processor
from inference_svc.pictures.sizes import Size, TileForm
from inference_svc.text.chat import TEMPLATE_CHARS, Chat, ChatMessage
from inference_svc.text.cut import Kept, PromptLimit
from inference_svc.text.encoder import Terms
from inference_svc.text.pair import Encoded, PairTokens
from inference_svc.text.prompt import (
    GROUP_CHARS,
    INLINE_CHARS,
    Prompt,
    PromptEncoder,
    Refused,
    Text,
)
from servicekit.errors import InvalidArgument, ShareExceeded
from servicekit.shared_memory import SharedBytes
from servicekit.work_budget import WorkBudget


def chat_of(*messages: tuple[str, str]) -> Chat:
    return Chat(tuple(ChatMessage(*each) for each in messages))


class Recording:
    """Tokens are characters; records the thread that made them last."""

    max_chars_per_token = 1
    renders_in_child = False
    thread: threading.Thread | None = None

    def name_of(self, token_id: int) -> str:
        return chr(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.thread = threading.current_thread()
        return [ord(char) for char in text]

    def encode_pair(self, first: str, second: str) -> PairTokens:
        texts = [0] * len(first) + [None] + [1] * len(second)
        types = [int(place > len(first)) for place in range(len(texts))]
        return PairTokens(self.encode(f"{first}|{second}"), types, texts)

    def shortened(self, text: str, num_fewer: int, kept: Kept) -> str:
        return kept.text(text, len(text) - num_fewer) if num_fewer < len(text) else ""

    def encode_chat(
        self, chat: Chat, max_chars: int, max_seconds: float, framed: Callable[[str], str] = str
    ) -> list[int]:
        return self.encode("".join(m.role + m.content for m in chat.messages) or ".")


def encode(prompt: Prompt, max_model_len: int = 10**6) -> tuple[tuple[int, ...], Recording]:
    async def body() -> tuple[int, ...]:
        prompts = PromptEncoder(recording, max_model_len, 128, WorkBudget("work", 1.0))
        try:
            return (await prompts.encode(prompt)).token_ids
        finally:
            prompts.close()

    recording = Recording()
    return asyncio.run(body()), recording


@pytest.mark.parametrize(("per_token", "most"), [(1, 10), (512, 10 + TEMPLATE_CHARS)])
def test_what_a_template_may_make_does_not_grow_with_an_adapters_tokens(
    per_token: int, most: int
) -> None:
    """It is as much as the model's own may be long, and the messages."""

    class Adapters(Recording):
        max_chars_per_token = per_token

        def encode_chat(
            self, chat: Chat, max_chars: int, max_seconds: float, framed: Callable[[str], str] = str
        ) -> list[int]:
            found.append(max_chars - INLINE_CHARS)
            return [1]

    async def body() -> None:
        prompts = PromptEncoder(Recording(), 10, 128, WorkBudget("work", 1.0))
        await prompts.encode(chat_of(("", "")), Terms(encoder=Adapters()))
        prompts.close()

    found: list[int] = []
    asyncio.run(body())
    assert found == [most]


def test_every_form_is_encoded() -> None:
    assert encode(Text("ab"))[0] == (97, 98)
    assert encode((5, 6))[0] == (5, 6)
    assert encode(chat_of(("a", "b"), ("c", "d")))[0] == (97, 98, 99, 100)


@pytest.mark.parametrize(
    ("prompt", "is_long"),
    [
        (Text("x" * INLINE_CHARS), False),
        (Text("x" * (INLINE_CHARS + 1)), True),
        (chat_of(("user", "hi")), False),
        (chat_of(("user", "x" * INLINE_CHARS)), True),
        (chat_of(("x" * INLINE_CHARS, "")), True),
        (chat_of(*[("", "")] * INLINE_CHARS), True),
    ],
    ids=["text", "long text", "chat", "long content", "long role", "many messages"],
)
def test_long_prompts_leave_the_event_loop(prompt: Prompt, is_long: bool) -> None:
    thread = encode(prompt)[1].thread
    assert (thread is not threading.main_thread()) == is_long


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Text(""), "at least one token"),
        ((), "at least one token"),
        (Text("abcd"), "has 4 tokens; at most 3"),
        (Text("é"), r"token 233 \(.*\); this model knows 128"),
        ((128,), "token 128"),
    ],
)
def test_invalid_prompts_are_refused(prompt: Prompt, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        encode(prompt, max_model_len=4)
    assert caught.value.subject == "prompt"


def test_prompt_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    for prompt in (Text("x" * 10_000), chat_of(("user", "x" * 10_000))):
        with pytest.raises(InvalidArgument, match="10000 characters") as caught:
            encode(prompt, max_model_len=5000)
        assert caught.value.subject == "prompt"
        assert encode(prompt, max_model_len=10_100)[1].thread is not None


def test_chat_of_more_messages_than_the_context_has_tokens_is_refused() -> None:
    chat = chat_of(*[("", "")] * 5001)
    with pytest.raises(InvalidArgument, match="has 5001 messages") as caught:
        encode(chat, max_model_len=5000)
    assert caught.value.subject == "prompt"
    assert encode(chat, max_model_len=5001)[0]


def test_refused_prompts_are_a_debt() -> None:
    class Slow(Recording):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            end_s = time.thread_time() + 0.02
            while time.thread_time() < end_s:
                pass
            return super().encode(text)

    work = WorkBudget("work", 0.5, processors=1e-6)

    async def main() -> None:
        prompts = PromptEncoder(Slow(), 5000, 128, work, share=0.5)
        try:
            assert await prompts.encode(Text("x" * 4000), Terms("a"))
            assert work.debt_s("a") == 0
            for prompt in (Text("x" * 5000), Text("é"), chat_of(("user", "x" * 4999))):
                with pytest.raises(InvalidArgument):
                    await prompts.encode(prompt, Terms("a"))
        finally:
            prompts.close()

    asyncio.run(main())
    assert 0.06 <= work.debt_s("a") < 0.5


@pytest.mark.parametrize("are_bodies", [False, True])
def test_tenants_take_turns(are_bodies: bool) -> None:
    """In the threads for prompts, and for what their transports parse."""
    is_served = threading.Event()

    class Held(Recording):
        """Tokenises one tenant's prompts only once another's is."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            if text[0] == "c":
                is_served.set()
            return [int(text[0] != "a" or is_served.wait(10))]

    async def body() -> list[tuple[int, ...]]:
        prompts = PromptEncoder(Held(), 10**6, 128, WorkBudget("work", 0.5), share=0.5)
        try:
            if are_bodies:
                parsing = [
                    prompts.threads_of(f"tenant {name}").submit(Held().encode, name)
                    for name in "a" * 20 + "bc"
                ]
                return [tuple(await asyncio.wrap_future(each)) for each in parsing]
            found = await asyncio.gather(
                *(
                    prompts.encode(Text(name * 3000), Terms(f"tenant {name}"))
                    for name in "a" * 20 + "bc"
                )
            )
            return [each.token_ids for each in found]
        finally:
            prompts.close()

    assert asyncio.run(body()) == [(1,)] * 22


@pytest.mark.parametrize("retry_s", [60.0, 0.0])
def test_slow_template_leaves_the_event_loop(
    retry_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inference_svc.text.prompt.INLINE_RETRY_SECONDS", retry_s)

    class Slow(Recording):
        def encode_chat(
            self, chat: Chat, max_chars: int, max_seconds: float, framed: Callable[[str], str] = str
        ) -> list[int]:
            self.encode("x")
            threads.append(self.thread)
            if self.thread is threading.main_thread():
                raise TemplateTimeout("too slow")
            return [1]

    async def body() -> None:
        prompts = PromptEncoder(Slow(), 10**6, 128, WorkBudget("work", 1.0))
        try:
            for _ in range(2):
                assert await prompts.encode(chat_of(("user", "hi"))) == Encoded((1,))
        finally:
            prompts.close()

    threads: list[threading.Thread | None] = []
    asyncio.run(body())
    is_main = [thread is threading.main_thread() for thread in threads]
    if retry_s:
        assert is_main == [True, False, False], "for a while none is tried on the loop"
    else:
        assert is_main == [True, False, True, False]
    assert [record.message for record in caplog.records] == [
        "chats are rendered in a thread"
    ] * sum(is_main)


def test_an_adapter_has_tokens_behind_the_models() -> None:
    """And an encoder of its own, whose name of a token is in the refusal of one without a row."""

    class Adapters(Recording):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [128 + int(char) for char in text]

        def name_of(self, token_id: int) -> str:
            return f"<{token_id}>"

    async def body() -> None:
        prompts = PromptEncoder(Recording(), 100, 128, WorkBudget("work", 1.0))
        assert await prompts.encode(Text("01"), Terms("", Adapters(), 2)) == Encoded((128, 129))
        assert await prompts.encode((129,), Terms("", Adapters(), 2)) == Encoded((129,))
        for prompt in (Text("2"), (130,)):
            with pytest.raises(InvalidArgument, match=r"token 130 \('<130>'\).* knows 130"):
                await prompts.encode(prompt, Terms("", Adapters(), 2))
        with pytest.raises(InvalidArgument, match="token 128"):
            await prompts.encode((128,))
        prompts.close()

    asyncio.run(body())


def test_texts_of_a_call_share_a_change_of_threads() -> None:
    """Up to one that is refused, whose error comes last, or is raised when it is the first."""

    async def body() -> None:
        prompts = PromptEncoder(recording, 10**6, 128, WorkBudget("work", 1.0))
        try:
            assert len(await prompts.encode_next(texts, 0, num_chars_before=INLINE_CHARS)) == 1
            assert len(await prompts.encode_next(texts, 1, num_chars_before=0)) == 1
            assert recording.thread is threading.main_thread()
            group = await prompts.encode_next(texts, 1, num_chars_before=INLINE_CHARS)
            assert recording.thread is not threading.main_thread()
            assert group == [await prompts.encode(each) for each in texts[1:21]]
            assert sum(map(len, (each.token_ids for each in group))) == GROUP_CHARS
            rest = await prompts.encode_next(texts, 21, num_chars_before=INLINE_CHARS)
            assert rest[:9] == group[:9]
            assert isinstance(rest[9], InvalidArgument)
            assert len(rest) == 10
            with pytest.raises(InvalidArgument, match="token 233"):
                await prompts.encode_next(texts, 30, num_chars_before=INLINE_CHARS)
        finally:
            prompts.close()

    recording = Recording()
    texts = [Text("a"), *[Text("x" * 400)] * 29, Text("é" * 400), Text("x" * 400)]
    asyncio.run(body())


def test_a_refused_text_of_a_group_is_tokenised_once() -> None:
    class Counting(Recording):
        num_texts = 0

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            self.num_texts += 1
            return super().encode(text)

    async def main() -> list[Encoded | Refused]:
        found: list[Encoded | Refused] = []
        prompts = PromptEncoder(encoder, 10**6, 128, WorkBudget("work", 1.0))
        while not (found and isinstance(found[-1], InvalidArgument)):
            found += await prompts.encode_next(texts, len(found), num_chars_before=INLINE_CHARS)
        prompts.close()
        return found

    encoder, texts = Counting(), [Text("x" * 400), Text("x" * 400), Text("é" * 400)]
    assert len(asyncio.run(main())) == encoder.num_texts == 3


@pytest.mark.parametrize("index", [0, 1])
def test_a_call_waits_until_the_debt_for_costly_templates_is_paid(index: int) -> None:
    """Also its texts that share a change of threads."""

    class InChild(Recording):
        renders_in_child = True

    async def main() -> None:
        prompts = PromptEncoder(InChild(), 10**6, 128, work)
        texts = [Text("x" * 3000), Text("x" * 400)]
        await prompts.encode_next(texts, index, Terms("b"), INLINE_CHARS)
        with pytest.raises(ShareExceeded):
            await prompts.encode_next(texts, index, Terms("a"), INLINE_CHARS)
        prompts.close()

    work = WorkBudget("work", 0.5, processors=1e-6, wait_s=0.05)
    work.charge("a", 1.0)
    asyncio.run(main())


class Framed(Recording):
    """Adds a token before and one behind."""

    longest = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.longest = max(self.longest, len(text))
        own = [ord(char) for char in text]
        return [1, *own, 2] if add_special_tokens else own


@pytest.mark.parametrize(
    ("prompt", "kept", "tokens"),
    [
        (Text("abcdef"), Kept.FIRST, (1, 97, 98, 2)),
        (Text("abcdef"), Kept.LAST, (1, 101, 102, 2)),
        (Text("ab"), Kept.FIRST, (1, 97, 98, 2)),
        (Text("abcdef", add_special_tokens=False), Kept.LAST, (99, 100, 101, 102)),
        ((1, 2, 3, 4, 5), Kept.FIRST, (1, 2, 3, 4)),
        ((1, 2, 3, 4, 5), Kept.LAST, (2, 3, 4, 5)),
        (Text("a" * 5000), Kept.FIRST, (1, 97, 97, 2)),
    ],
)
def test_a_prompt_is_cut(prompt: Prompt, kept: Kept, tokens: tuple[int, ...]) -> None:
    """The tokenizer's own tokens stay, and only characters that may be kept are tokenised."""

    async def body(limit: PromptLimit) -> tuple[int, ...]:
        prompts = PromptEncoder(encoder, 10, 128, WorkBudget("work", 1.0))
        try:
            terms = Terms(num_answer_tokens=0, limit=limit)
            return (await prompts.encode(prompt, terms)).token_ids
        finally:
            prompts.close()

    encoder = Framed()
    assert asyncio.run(body(PromptLimit(4, kept))) == tokens
    assert encoder.longest <= 8
    if len(tokens) < (len(prompt) if isinstance(prompt, tuple) else len(prompt.text)):
        with pytest.raises(InvalidArgument, match=r"at most 4 are taken|context of 10 tokens"):
            asyncio.run(body(PromptLimit(4, why="are taken")))


@pytest.mark.parametrize("prompt", [(5, 80, 6), Text("aPb")])
def test_placeholders_are_no_words_of_a_server_of_text(prompt: Prompt) -> None:
    """They stand for images and the like, which it does not read."""

    async def body(ids: tuple[int, ...]) -> tuple[int, ...]:
        work = WorkBudget("work", 1.0)
        prompts = PromptEncoder(Recording(), 100, 128, work, placeholder_ids=ids)
        try:
            return (await prompts.encode(prompt)).token_ids
        finally:
            prompts.close()

    assert 80 in asyncio.run(body((81,)))
    with pytest.raises(InvalidArgument, match=r"token 80 \('P'\), which stands for an image") as e:
        asyncio.run(body((80, 82)))
    assert e.value.subject == "prompt"


def test_placeholders_of_videos_are_no_words_of_a_server_that_reads_images() -> None:
    rule = PictureRule(Processor(Form.WHOLE, 8, 3, HALF, HALF), 80, TileForm(8, 4), 2)

    async def body(ids: tuple[int, ...]) -> tuple[int, ...]:
        work = WorkBudget("work", 1.0)
        prompts = PromptEncoder(
            Recording(), 100, 128, work, picture_rule=rule, placeholder_ids=(80, 81)
        )
        try:
            return (await prompts.encode(ids)).token_ids
        finally:
            prompts.close()

    assert asyncio.run(body((5, 6))) == (5, 6)
    with pytest.raises(InvalidArgument, match=r"token 81 \('Q'\), which stands for a video"):
        asyncio.run(body((5, 81)))
    with pytest.raises(InvalidArgument, match=r"token 80 \('P'\), which stands for an image: send"):
        asyncio.run(body((5, 80)))


class Pictures:
    """Two pictures of a tile each, whose reading is counted."""

    num_pictures = 2

    def __init__(self) -> None:
        self.num_reads = 0

    async def read(self) -> tuple[Tiles, ...]:
        self.num_reads += 1
        return (Tiles(SharedBytes.of("pixels", b"1"), Size(8, 8), 1, 0, 0, b""),) * 2


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((80, 5), "shows 1 of the 2 images"),
        ((80, 80, *[5] * 12), "has 20 tokens; at most 19"),
        ((80, 80, *[5] * 11), ""),
    ],
)
def test_pictures_are_read_once_their_prompt_may_fit(prompt: tuple[int, ...], words: str) -> None:
    processor = Processor(Form.WHOLE, 8, 3, HALF, HALF)
    rule, pictures = PictureRule(processor, 80, TileForm(8, 4), 2), Pictures()

    async def body() -> tuple[int, ...]:
        work = WorkBudget("work", 1.0)
        prompts = PromptEncoder(Recording(), 20, 128, work, picture_rule=rule)
        try:
            return (await prompts.encode(prompt, pictures=pictures)).token_ids
        finally:
            prompts.close()

    if not words:
        assert asyncio.run(body()) == (*[80] * 8, *prompt[2:])
        assert pictures.num_reads == 1
        return
    with pytest.raises(InvalidArgument, match=words):
        asyncio.run(body())
    assert pictures.num_reads == 0


def test_a_prompt_whose_pictures_do_not_fit_never_has_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pictures of any size may have millions."""
    monkeypatch.setattr(PictureRule, "expanded", None)
    rule = PictureRule(Processor(Form.FREE, 0, 3, HALF, HALF), 80, TileForm(0, 1, merge=2), 2)

    async def body() -> None:
        prompts = PromptEncoder(Recording(), 20, 128, WorkBudget("work", 1.0), picture_rule=rule)
        try:
            await prompts.encode((5, 80, 80, 6), pictures=Pictures())
        finally:
            prompts.close()

    with pytest.raises(InvalidArgument, match="has 34 tokens; at most 19"):
        asyncio.run(body())
