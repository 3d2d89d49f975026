"""A random model of SmolVLM's shape that reads images, its adapters, and images for it."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import torch
import transformers
from PIL import Image

from tests.support.pictures.templates import save_reader_tokenizer

ADAPTERS = tuple(f"adapter-{index}" for index in range(4))
RANK = 8
QUESTION = "the quick brown fox jumps over the lazy dog"


class Shape(NamedTuple):
    """The sizes of a tower and of a decoder behind it. A tile of `tile` pixels each side becomes
    `tile_tokens` tokens."""

    tile: int
    patch: int
    merge: int
    vision_size: int
    vision_layers: int
    text_size: int
    text_layers: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def tile_tokens(self) -> int:
        return (self.tile // self.patch // self.merge) ** 2


SHAPES = {
    "smolvlm-256m": Shape(512, 16, 4, 768, 12, 576, 30, 9, 3, 49280),
    "tiny": Shape(56, 14, 2, 32, 2, 48, 2, 6, 2, 512),
}


def make_model(shape: Shape, num_tiles: int, folder: Path) -> None:
    """Saves a random model in fp32, with its tokenizer. A square image is cut into `num_tiles` each
    side, and one of the whole; 1: it is one tile."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    token_ids = save_reader_tokenizer("SmolVLM", folder)
    text = {
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.text_size,
        "intermediate_size": shape.text_size * 8 // 3,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    vision = {
        "hidden_size": shape.vision_size,
        "intermediate_size": 4 * shape.vision_size,
        "num_hidden_layers": shape.vision_layers,
        "num_attention_heads": max(2, shape.vision_size // 64),
        "image_size": shape.tile,
        "patch_size": shape.patch,
    }
    config = transformers.SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        scale_factor=shape.merge,
        **token_ids,
        tie_word_embeddings=True,
    )
    model: Any = transformers.SmolVLMForConditionalGeneration._from_config(
        config, dtype=torch.float32
    )
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    values = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": num_tiles * shape.tile},
        "max_image_size": {"longest_edge": shape.tile},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(values))


def make_adapters(model_dir: Path, folder: Path) -> dict[str, Path]:
    """Returns the folders of random adapters of queries and values, by name."""
    model: Any = transformers.SmolVLMForConditionalGeneration.from_pretrained(
        model_dir, dtype=torch.float32
    )
    target, adapted = r".*text_model\..*\.(q|v)_proj", model
    for index, name in enumerate(ADAPTERS):
        torch.manual_seed(index)
        config = peft.LoraConfig(r=RANK, target_modules=target, init_lora_weights=False)
        if index:
            adapted.add_adapter(name, config)
        else:
            adapted = peft.get_peft_model(model, config, adapter_name=name)
    adapted.save_pretrained(folder)
    return {name: folder / name for name in ADAPTERS}


def make_image(shape: Shape, num_tiles: int, seed: int) -> bytes:
    """Returns a square image as a JPEG file, unlike the ones of other seeds."""
    side = shape.tile * num_tiles
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (16, 16, 3), np.uint8)
    found = Image.fromarray(coarse, "RGB").resize((side, side), Image.Resampling.BICUBIC)
    file = BytesIO()
    found.save(file, "JPEG", quality=90)
    return file.getvalue()
