"""Placeholders become the tokens of pictures, and their places are found again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inference_svc.pictures.decoding import Tiles
from inference_svc.pictures.placeholders import FRAME, WHOLE, PictureRule
from inference_svc.pictures.processor import HALF, Form, Processor
from inference_svc.pictures.sizes import Size, TileForm
from inference_svc.text.tokenizer import Tokenizer
from servicekit.errors import InvalidArgument
from servicekit.shared_memory import SharedBytes
from tests.support.pictures.templates import IMAGE, save_reader_tokenizer

PER_TILE = 64
FORM = TileForm(8, 1)
SPLIT = Processor(Form.SPLIT, 8, 1, HALF, HALF, longest=24, splits=True)
PLAIN = Processor(Form.WHOLE, 8, 3, HALF, HALF)
PIXELS = SharedBytes.of("pixels", b"1")


def tiles(rows: int = 0, columns: int = 0) -> Tiles:
    return Tiles(PIXELS, Size(8, 8), rows * columns + 1, rows, columns, bytes([rows, columns]))


def text_of(found: Tiles) -> str:
    """Returns the text of a picture that is cut, as transformers' processor has it."""
    own, text = IMAGE * PER_TILE, ""
    for y in range(1, found.rows + 1):
        for x in range(1, found.columns + 1):
            text += f"{FRAME}<row_{y}_col_{x}>{own}"
        text += "\n"
    return text + ("\n" if found.rows else "") + f"{FRAME}{WHOLE}{own}{FRAME}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Callable[[str], list[int]]]:
    """The placeholder, and a function that makes tokens of short texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    token_id = save_reader_tokenizer("SmolVLM", folder)["image_token_id"]
    made = Tokenizer(folder)
    return token_id, lambda text: made.encode(text, add_special_tokens=False)


def test_tokens_are_the_ones_of_the_whole_text(tokenizer: tuple) -> None:
    """The text that is tokenised is short, however many tokens a tile has."""
    token_id, encode = tokenizer
    rule = PictureRule(SPLIT, token_id, FORM, 4)
    pictures = [tiles(), tiles(3, 2), tiles(1, 3)]
    before, between, after = (encode(text) for text in ("the fox", "jumps", "over"))
    prompt = (*before, token_id, *between, token_id, token_id, *after)
    lengths: list[int] = []

    def measured(text: str) -> list[int]:
        lengths.append(len(text))
        return encode(text)

    assert [rule.num_tokens(each) for each in pictures] == [PER_TILE, 7 * PER_TILE, 4 * PER_TILE]
    found = rule.expanded(prompt, pictures, IMAGE, measured)
    one, two, three = (encode(text_of(each)) for each in pictures)
    assert list(found) == [*before, *one, *between, *two, *three, *after]
    assert max(lengths) < PER_TILE * len(IMAGE), "one placeholder for each tile"
    places = rule.found(found, pictures)
    assert [len(each.runs) for each in places] == [1, 7, 4]
    all_of_them = [place for each in places for run in each.runs for place in range(*run)]
    assert all_of_them == [place for place, each in enumerate(found) if each == token_id]
    assert [each.digest for each in places] == [each.digest for each in pictures]


def test_neighbouring_pictures_have_places_of_their_own() -> None:
    rule = PictureRule(PLAIN, 80, TileForm(8, 5, num_added=2), 4)
    found = rule.expanded((5, 80, 80, 6), [tiles(), tiles()], IMAGE, lambda text: [])
    assert found == (5, *[80] * 6, 6)
    assert [each.runs for each in rule.found(found, [tiles(), tiles()])] == [((1, 4),), ((4, 7),)]


def test_a_tokenizer_without_the_placeholder_is_named(tokenizer: tuple) -> None:
    rule = PictureRule(SPLIT, 80, FORM, 4)
    with pytest.raises(InvalidArgument, match=r"finds 0 of 3 placeholders \('<image>'\)") as error:
        rule.expanded((80,), [tiles(2, 1)], IMAGE, lambda text: [1, 2])
    assert error.value.subject == "prompt"
