"""Makes inputs as those processors of transformers that need torchvision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image

from tests.support.pictures.templates import GEMMA4_TOKENS, MISTRAL_IMAGE, QWEN_IMAGE


@dataclass
class Processor(ABC):
    """Makes inputs of texts in which `image` stands for each picture. With `marks_images` they say
    which tokens are of pictures."""

    pictures: Any
    tokenizer: Any
    image: ClassVar[str]
    marks_images: ClassVar[bool] = True

    def __call__(self, text: str, images: Sequence[Image.Image] = (), **options: Any) -> Any:
        made = {}
        if images:
            made = dict(self.pictures(images=list(images), return_tensors="pt"))
            first, *others = text.split(self.image)
            parts = zip(self._texts(made), others, strict=True)
            text = first + "".join(own + other for own, other in parts)
        made["input_ids"] = self.tokenizer(text, **options)["input_ids"]
        if self.marks_images:
            is_image = made["input_ids"] == self.tokenizer.convert_tokens_to_ids(self.image)
            made["mm_token_type_ids"] = is_image.int()
        return made

    @abstractmethod
    def _texts(self, made: dict[str, Any]) -> Iterator[str]:
        """Yields the text in the place of each picture of which these inputs were made."""


class QwenProcessor(Processor):
    """Makes inputs as transformers' processors of Qwen do, which need torchvision for videos."""

    image = QWEN_IMAGE

    def _texts(self, made: dict[str, Any]) -> Iterator[str]:
        counts = made["image_grid_thw"].prod(1) // self.pictures.merge_size**2
        return (self.image * int(count) for count in counts)


class MistralProcessor(Processor):
    """Makes inputs as transformers' processor of Pixtral does, which needs torchvision."""

    image = MISTRAL_IMAGE
    marks_images = False

    def _texts(self, made: dict[str, Any]) -> Iterator[str]:
        side = self.pictures.patch_size["height"]
        for height, width in made["image_sizes"]:
            row = self.image * (int(width) // side)
            yield "[IMG_BREAK]".join([row] * (int(height) // side)) + "[IMG_END]"


class Gemma4Processor(Processor):
    """Makes inputs as transformers' processor of Gemma 4 does, which needs torchvision."""

    image = GEMMA4_TOKENS["image"]

    def _texts(self, made: dict[str, Any]) -> Iterator[str]:
        begin, _, end = GEMMA4_TOKENS.values()
        counts = made.pop("num_soft_tokens_per_image")
        return (f"{begin}{self.image * int(count)}{end}" for count in counts)
