"""Marks around a picture's tokens join with the text of its conversation, as transformers' do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference_svc.api.pictures import PictureReader
from inference_svc.pictures.decoding import Tiles
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.pictures.processor import read_processor
from inference_svc.pictures.prompt import Frame
from inference_svc.pictures.sizes import Size, TileForm
from inference_svc.pictures.uploads import Uploads
from inference_svc.text.chat import Chat, ChatMessage, MessageImage
from inference_svc.text.prompt import Prompt, PromptEncoder
from inference_svc.text.tokenizer import Tokenizer
from servicekit.errors import InvalidArgument
from servicekit.shared_memory import SharedBytes
from servicekit.shares import Shares
from servicekit.work_budget import WorkBudget
from tests.support.pictures.models import TILE, save_processor
from tests.support.pictures.templates import GEMMA3_TOKENS, VOCAB, save_reader_tokenizer

BEGIN, SOFT, END = GEMMA3_TOKENS.values()
FORM = TileForm(TILE, TILE // 2)
NUM_TOKENS = 4
PIXELS = SharedBytes.of("pixels", b"1")


class Pictures:
    def __init__(self, count: int) -> None:
        self.num_pictures = count

    async def read(self) -> tuple[Tiles, ...]:
        return (Tiles(PIXELS, Size(TILE, TILE), 1, 0, 0, b""),) * self.num_pictures


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save_reader_tokenizer("Gemma3", tmp_path)
    return Tokenizer(tmp_path)


@pytest.fixture
def rule(tokenizer: Tokenizer, tmp_path: Path) -> PictureRule:
    save_processor("Gemma3", tmp_path)
    begin, token, end = (tokenizer.backend.token_to_id(each) for each in (BEGIN, SOFT, END))
    processor = read_processor(tmp_path, FORM)
    return PictureRule(processor, token, FORM, 2, Frame(begin, end, "\n\n"))


def encode(tokenizer: Tokenizer, rule: PictureRule, prompt: Prompt, count: int) -> list[int]:
    """Returns the tokens of a prompt with so many pictures."""

    async def body() -> tuple[int, ...]:
        prompts = PromptEncoder(tokenizer, 200, VOCAB, WorkBudget("work", 1.0), picture_rule=rule)
        try:
            found = await prompts.encode(prompt, pictures=Pictures(count))
            return found.token_ids
        finally:
            prompts.close()

    return list(asyncio.run(body()))


def chat_of(content: str, *places: int) -> Chat:
    images = tuple(MessageImage(place, b"", f"image {place}") for place in places)
    return Chat((ChatMessage("user", content, images=images),))


def test_line_feeds_join_with_the_ones_around(tokenizer: Tokenizer, rule: PictureRule) -> None:
    """Three of them are one token."""
    ids = encode(tokenizer, rule, chat_of("ab", 0, 1, 1), 3)
    own = f"\n\n{BEGIN}{SOFT * NUM_TOKENS}{END}\n\n"
    whole = f"<s><start_of_turn>user\n{own}a{own}{own}b<end_of_turn>\n<start_of_turn>model\n"
    assert ids == tokenizer.encode(whole, add_special_tokens=False)
    assert tokenizer.backend.token_to_id("\n\n\n") in ids
    pictures = rule.found(tuple(ids), [Tiles(PIXELS, Size(TILE, TILE), 1, 0, 0, b"")] * 3)
    assert [each.num_tokens for each in pictures] == [NUM_TOKENS] * 3
    assert all(len(each.runs) == 1 for each in pictures)


def test_a_text_is_encoded_as_ever(tokenizer: Tokenizer, rule: PictureRule) -> None:
    ids = encode(tokenizer, rule, chat_of("ab"), 0)
    text = "<s><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
    assert ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("mark", [BEGIN, SOFT])
@pytest.mark.parametrize("count", [0, 1])
def test_tokens_that_stand_for_pictures_are_refused(
    mark: str, count: int, tokenizer: Tokenizer, rule: PictureRule
) -> None:
    """The one that the template writes, and the ones that stand for parts of a picture."""
    begin, token = (tokenizer.backend.token_to_id(each) for each in (BEGIN, mark))
    prompt = (5, *[begin] * count, token)
    with pytest.raises(
        InvalidArgument, match=f"token {token} \\('{mark}'\\).* stands for an image"
    ):
        encode(tokenizer, rule, prompt, count)


@pytest.mark.parametrize("mark", [BEGIN, SOFT])
def test_their_texts_are_refused_by_the_message(
    mark: str, tokenizer: Tokenizer, rule: PictureRule
) -> None:
    pixels = Shares("prompt_image_bytes", 1 << 20, 1.0)
    reader = PictureReader(None, "model", pixels, Uploads("uploads", 1))
    reader.rule = rule
    names = rule.names(tokenizer.name_of)
    reader.check(chat_of(f"no {END}", 0), names)
    with pytest.raises(InvalidArgument, match=r"messages\[0\].content: .*stands for an image"):
        reader.check(chat_of(f"no {mark}", 0), names)
