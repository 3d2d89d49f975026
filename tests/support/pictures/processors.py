"""Makes inputs as those processors of transformers that need torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tests.support.pictures.templates import GEMMA4_TOKENS, MISTRAL_IMAGE, QWEN_IMAGE


@dataclass
class QwenProcessor:
    """Makes inputs as transformers' processors of Qwen do, which need torchvision for videos."""

    pictures: Any
    tokenizer: Any

    def __call__(self, text: str, images: Sequence[Image.Image] = (), **options: Any) -> Any:
        made = {}
        if images:
            made = dict(self.pictures(images=list(images), return_tensors="pt"))
            counts = made["image_grid_thw"].prod(1) // self.pictures.merge_size**2
            first, *others = text.split(QWEN_IMAGE)
            tokens = (QWEN_IMAGE * int(count) for count in counts)
            parts = zip(tokens, others, strict=True)
            text = first + "".join(own + other for own, other in parts)
        ids = self.tokenizer(text, **options)["input_ids"]
        is_image = ids == self.tokenizer.convert_tokens_to_ids(QWEN_IMAGE)
        return made | {"input_ids": ids, "mm_token_type_ids": is_image.int()}


@dataclass
class MistralProcessor:
    """Makes inputs as transformers' processor of Pixtral does, which needs torchvision."""

    pictures: Any
    tokenizer: Any

    def __call__(self, text: str, images: Sequence[Image.Image] = (), **options: Any) -> Any:
        made = {}
        if images:
            made = dict(self.pictures(images=list(images), return_tensors="pt"))
            first, *others = text.split(MISTRAL_IMAGE)
            side = self.pictures.patch_size["height"]
            for (height, width), other in zip(made["image_sizes"], others, strict=True):
                rows, columns = int(height) // side, int(width) // side
                row = MISTRAL_IMAGE * columns
                first += "[IMG_BREAK]".join([row] * rows) + "[IMG_END]" + other
            text = first
        return made | {"input_ids": self.tokenizer(text, **options)["input_ids"]}


@dataclass
class Gemma4Processor:
    """Makes inputs as transformers' processor of Gemma 4 does, which needs torchvision."""

    pictures: Any
    tokenizer: Any

    def __call__(self, text: str, images: Sequence[Image.Image] = (), **options: Any) -> Any:
        made = {}
        begin, image, end = GEMMA4_TOKENS.values()
        if images:
            made = dict(self.pictures(images=list(images), return_tensors="pt"))
            counts = made.pop("num_soft_tokens_per_image")
            first, *others = text.split(image)
            for count, other in zip(counts, others, strict=True):
                first += f"{begin}{image * int(count)}{end}{other}"
            text = first
        ids = self.tokenizer(text, **options)["input_ids"]
        is_image = ids == self.tokenizer.convert_tokens_to_ids(image)
        return made | {"input_ids": ids, "mm_token_type_ids": is_image.int()}
