"""The tokens that stand for pictures in a prompt.

A chat template writes one placeholder for each picture; here it becomes as many as the picture has
embeddings, with the marks around them that the model was trained with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inference_svc.pictures.decoding import Tiles
from inference_svc.pictures.processor import Form, Processor
from inference_svc.pictures.prompt import Frame, PromptPicture, Run
from inference_svc.pictures.sizes import TileForm
from servicekit.errors import InvalidArgument

ROW_END, LAST_ROW_END = "[IMG_BREAK]", "[IMG_END]"
"""Pixtral's marks behind the rows of a picture."""
FRAME, WHOLE = "<fake_token_around_image>", "<global-img>"
"""The marks of Idefics3 and SmolVLM around the tiles of a picture, and before the tile of all."""


@dataclass(frozen=True, slots=True)
class PictureRule:
    """How a server reads pictures: at most `max_pictures` in a request, whose tokens are
    `token_id`, as many for each tile of the `processor` as its `tiles` have. The prompt may have a
    `frame` around them, or a mark behind each row of them if it `has_rows`."""

    processor: Processor
    token_id: int
    tiles: TileForm
    max_pictures: int
    frame: Frame | None = None
    has_rows: bool = False

    @property
    def placeholder_id(self) -> int:
        """The token that a chat template writes for a picture."""
        frame = self.frame
        return frame.begin_id if frame is not None and frame.replaces_begin else self.token_id

    def names(self, name_of: Callable[[int], str]) -> tuple[str, ...]:
        """Returns the texts of the tokens that stand for pictures, as `name_of` has them."""
        return tuple({name_of(each): None for each in (self.placeholder_id, self.token_id)})

    def framed(self, text: str, name_of: Callable[[int], str]) -> str:
        """Returns the text of a conversation with the frames of its pictures, before it becomes
        tokens: these depend on the text on both sides."""
        if self.frame is None:
            return text
        begin, end = name_of(self.frame.begin_id), name_of(self.frame.end_id)
        name, around = name_of(self.placeholder_id), self.frame.around
        inner = "" if name == begin else name
        return text.replace(name, f"{around}{begin}{inner}{end}{around}") if name else text

    @property
    def min_tokens(self) -> int:
        """The tokens of the smallest picture."""
        return self.tiles.tokens(self.tiles.whole) if self.tiles.tile_size else 1

    def num_tokens(self, tiles: Tiles) -> int:
        """Returns how many tokens stand for a picture: those that have embeddings."""
        return math.prod(self._runs(tiles))

    def expanded(
        self,
        token_ids: tuple[int, ...],
        pictures: Sequence[Tiles],
        name: str,
        encode: Callable[[str], list[int]],
    ) -> tuple[int, ...]:
        """Returns a prompt with all tokens of its pictures, for a prompt with one placeholder each.
        `name` is the text of their tokens; `encode` makes tokens of a text, and adds none."""
        if not pictures:
            return token_ids
        left = iter(pictures)
        found: list[int] = []
        for token_id in token_ids:
            if token_id != self.placeholder_id:
                found.append(token_id)
                continue
            if token_id != self.token_id:
                found.append(token_id)
            found += self._tokens(next(left), name, encode)
        return tuple(found)

    def check(
        self, token_ids: tuple[int, ...], num_pictures: int, name_of: Callable[[int], str]
    ) -> None:
        """Raises InvalidArgument for a prompt, before it is expanded, with another number of
        placeholders than pictures: tokens that stand for pictures are never computed as words."""
        count = token_ids.count(self.placeholder_id)
        if count < num_pictures:
            raise InvalidArgument(
                f"the chat template shows {count} of the {num_pictures} images of these messages",
                subject="prompt",
            )
        has_own = self.placeholder_id != self.token_id and self.token_id in token_ids
        if count > num_pictures or has_own:
            token_id = self.token_id if has_own else self.placeholder_id
            raise InvalidArgument(
                f"prompt has the token {token_id} ({name_of(token_id)!a}), which stands for an "
                "image: send images as parts of chat messages, and leave it out of texts and token "
                "ids",
                subject="prompt",
            )

    def _tokens(self, tiles: Tiles, name: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Returns the tokens of one picture. The text that is tokenised has one placeholder for
        each run: with all of them it would take milliseconds. Raises InvalidArgument."""
        num_runs, num_tokens = self._runs(tiles)
        own = [self.token_id] * num_tokens
        if self.has_rows:
            marked = encode(ROW_END.join([name] * num_runs) + LAST_ROW_END)
        elif self.processor.form is Form.SPLIT:
            marked = encode(_split_text(tiles, name))
        else:
            return own
        if (count := marked.count(self.token_id)) != num_runs:
            raise InvalidArgument(
                f"the tokenizer finds {count} of {num_runs} placeholders ({name!a}) among "
                "the marks of an image: it must know the placeholder as a token of its own",
                subject="prompt",
            )
        found: list[int] = []
        for token_id in marked:
            if token_id == self.token_id:
                found += own
            else:
                found.append(token_id)
        return found

    def _runs(self, tiles: Tiles) -> tuple[int, int]:
        """Returns how many runs of tokens stand for a picture, and the tokens of each: a tile's, or
        a row's."""
        if self.has_rows:
            return self.tiles.cells(tiles.tile)
        return tiles.num_tiles, self.tiles.tokens(tiles.tile)

    def found(
        self, token_ids: tuple[int, ...], pictures: Sequence[Tiles]
    ) -> tuple[PromptPicture, ...]:
        """Returns the pictures of a prompt that `expanded` has made, with the places of their
        tokens."""
        made: list[PromptPicture] = []
        end = 0
        for each in pictures:
            num_runs, num_tokens = self._runs(each)
            runs = []
            for _ in range(num_runs):
                start = token_ids.index(self.token_id, end)
                end = start + num_tokens
                runs.append(Run(start, end))
            made.append(
                PromptPicture(each.digest, each.pixels, each.tile, each.num_tiles, tuple(runs))
            )
        return tuple(made)


def _split_text(tiles: Tiles, name: str) -> str:
    """Returns the marks of a picture that is cut, with one placeholder for each tile."""
    lines = [
        "".join(f"{FRAME}<row_{y}_col_{x}>{name}" for x in range(1, tiles.columns + 1)) + "\n"
        for y in range(1, tiles.rows + 1)
    ]
    last = f"{FRAME}{WHOLE}{name}{FRAME}"
    return "".join((*lines, "\n", last)) if lines else last
