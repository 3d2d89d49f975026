"""Models that read pictures, the oracle, and the prompts that a server makes of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from inference_svc.app import picture_rule
from inference_svc.model.architectures import load_description
from inference_svc.pictures.decoding import PictureDecoder
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.pictures.prompt import PromptPicture
from inference_svc.text.tokenizer import Tokenizer
from tests.support.models.zoo import AdapterSpec
from tests.support.pictures.files import encoded, picture
from tests.support.pictures.models import SPECS, ReaderZoo, make_reader_zoo
from tests.support.pictures.templates import image_name
from tests.system.engines import Running

NUM_TOKENS = 48
SETTINGS = {
    "max_prompt_images": 4,
    "prompt_image_bytes": 1 << 20,
    "max_model_len": 512,
    "kv_bytes": 8 << 20,
}
PICTURES = (picture(90, 61), picture(61, 140, seed=1), picture(57, 56, seed=2))
"""Of odd sizes."""


def asked(*parts: str | Image.Image) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Returns the message of a user with texts and pictures."""
    content = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
        for each in parts
    ]
    pictures = [each for each in parts if not isinstance(each, str)]
    return [{"role": "user", "content": content}], pictures


PROMPTS = {
    "one": asked(PICTURES[0], "the quick brown fox"),
    "three": asked("jumps", PICTURES[1], "over", PICTURES[0], PICTURES[2], "the lazy dog"),
    "text": asked("the quick brown fox jumps over the lazy dog"),
}


class Reader:
    """A model that reads pictures, the oracle, and what a server makes of conversations."""

    def __init__(self, name: str, folder: Path, specs: Sequence[AdapterSpec] = SPECS) -> None:
        self.oracle: ReaderZoo = make_reader_zoo(name, folder, specs)
        self.zoo = self.oracle.zoo
        decoder = load_description(self.zoo.model_dir, with_pictures=True)
        rule = picture_rule(decoder, 4)
        assert decoder.pictures is not None
        assert rule is not None
        self.pictures = decoder.pictures
        self.rule: PictureRule = rule
        self.decoder = PictureDecoder(rule.processor)
        self.tokenizer = Tokenizer(self.zoo.model_dir)
        self._answers: dict[Any, list[int]] = {}

    def close(self) -> None:
        self.decoder.close()

    def prompt(self, name: str) -> tuple[list[int], tuple[PromptPicture, ...]]:
        messages, pictures = PROMPTS[name]
        text = self.oracle.processor.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        text = self.rule.framed(text, self.tokenizer.name_of)
        tiles = [self.decoder.decode(encoded(each), "image") for each in pictures]
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))

        def encode(part: str) -> list[int]:
            return self.tokenizer.encode(part, add_special_tokens=False)

        ids = self.rule.expanded(ids, tiles, image_name(self.oracle.name), encode)
        return list(ids), self.rule.found(ids, tiles)

    def expected(
        self, adapter: str, name: str, guess: Sequence[int] = (), count: int = NUM_TOKENS
    ) -> list[int]:
        """Returns the oracle's answer, which a right guess makes quick."""
        key = adapter, name, count
        if key not in self._answers:
            inputs = self.oracle.inputs(*PROMPTS[name])
            self._answers[key] = self.oracle.greedy(adapter, inputs, count, guess)
        return self._answers[key]


def submit(running: Running, reader: Reader, adapter: str, name: str, **options: Any) -> str:
    prompt, pictures = reader.prompt(name)
    request_id = f"{adapter} {name} {len(running.outputs)}"
    options = {"max_tokens": NUM_TOKENS} | options
    running.submit(request_id, prompt, adapter, pictures=pictures, **options)
    return request_id
