"""Tiny models that read pictures, with random weights, and prompts with a picture for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from inference_svc import core
from inference_svc.adapters.targets import applied_to_pictures
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.pictures import IN_TORCH, PictureRows
from inference_svc.backends.torch import TorchBackend
from inference_svc.model.architectures import load_description
from inference_svc.model.description import Decoder
from inference_svc.model.layers import TorchProjections
from inference_svc.pictures.prompt import Encode, PictureKey, PictureWork, PromptPicture, Run
from inference_svc.pictures.sizes import Size
from kernels.lora import ReplacedWeight
from servicekit.shared_memory import SharedBytes
from tests.support.gpu.features import SHAPE
from tests.support.gpu.models import PAGE_SIZE, Model, moved, random_weights

PLACEHOLDER, TEXT = 60, 5
"""The token that stands for pictures, and the number of tokens before a picture's."""
VISION = {"hidden_size": 32, "intermediate_size": 48}
READERS: dict[str, tuple[dict[str, Any], dict[str, Any], Size]] = {
    "qwen2.5 vl": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "image_token_id": PLACEHOLDER,
            "text_config": SHAPE
            | {
                "model_type": "qwen2_5_vl_text",
                "rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2]},
            },
            "vision_config": VISION
            | {
                "depth": 2,
                "num_heads": 2,
                "out_hidden_size": SHAPE["hidden_size"],
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
        {"image_processor_type": "Qwen2VLImageProcessor"},
        Size(84, 140),
    ),
    "gemma3": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "image_token_index": PLACEHOLDER,
            "boi_token_index": PLACEHOLDER + 1,
            "eoi_token_index": PLACEHOLDER + 2,
            "mm_tokens_per_image": 16,
            "text_config": SHAPE
            | {
                "model_type": "gemma3_text",
                "query_pre_attn_scalar": 16,
                "sliding_window": 10,
                "layer_types": ["sliding_attention", "full_attention"],
                "tie_word_embeddings": True,
            },
            "vision_config": VISION
            | {
                "model_type": "siglip_vision_model",
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "image_size": 56,
                "patch_size": 7,
            },
        },
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
        },
        Size(56, 56),
    ),
}
"""Configs of models and processors, and the size of a tile: with windows and several positions; and
with tokens that see each other."""


def make_reader(name: str, folder: Path) -> Decoder:
    config, processor, _ = READERS[name]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return load_description(folder, with_pictures=True)


def give_tower(backend: CudaBackend | TorchBackend, model: Model) -> None:
    """Lets a backend of this model read pictures, with the same tower on every device."""
    arena, pictures = model.arena, model.transformer.description.pictures
    assert pictures is not None
    generator = torch.Generator().manual_seed(2)
    dtype = arena.layout.dtype
    weights = random_weights(pictures.tower, dtype, generator, TorchProjections())
    targets = applied_to_pictures(arena.layout)
    tower = IN_TORCH.make(pictures, moved(weights, arena.device), arena, targets)
    backend.pictures = PictureRows(pictures, lambda: tower, arena.streams.compute)


def replace_outputs(model: Model) -> None:
    """Gives the adapter at slot 0 whole output projections of the tower's attention."""
    layout, table = model.arena.layout, model.arena.table
    targets = applied_to_pictures(layout)
    outputs = [
        layout.targets[target].name
        for name, group in targets.groups.items()
        if name.endswith(".o")
        for target in group.targets
    ]
    assert outputs
    whole = tuple(ReplacedWeight(targets.weights[name], 16) for name in outputs)  # as A and B
    table.set_row(0, table.adapters[0].with_others({}, {}, whole))


def steps_with_pictures(
    name: str, decoder: Decoder, slots: Sequence[int]
) -> tuple[list[PictureWork], list[core.Batch]]:
    """Returns the work of pictures, and then steps: prompts of which two have one picture and the
    last is a text, and decodes of all."""
    pictures, tile = decoder.pictures, READERS[name][2]
    assert pictures is not None
    count = pictures.tiles.tokens(tile)
    values = torch.randint(256, (tile.height * tile.width * 3,), dtype=torch.uint8)
    pixels = SharedBytes.of("loadout-pixels", values.numpy().tobytes())
    picture = PromptPicture(b"a", pixels, tile, 1, (Run(TEXT, TEXT + count),))
    sequences, works, first_page = [], [], 0
    for index, slot in enumerate(slots):
        own = () if index == len(slots) - 1 else (picture,)
        tokens = [(5 * place + index) % 50 for place in range(TEXT + count * len(own) + 4)]
        tokens[TEXT : TEXT + count * len(own)] = [PLACEHOLDER] * count * len(own)
        request = core.Request(f"{index}", tuple(tokens), core.SamplingParams(), pictures=own)
        sequence = core.Sequence(request)
        sequence.slot = slot
        num_pages = -(-(len(tokens) + 2) // PAGE_SIZE)
        sequence.page_ids = list(range(first_page, first_page + num_pages))
        first_page += num_pages
        sequences.append(sequence)
        if own:
            key = PictureKey("", "" if slot < 0 else f"{slot}", picture.digest)
            sequence.held_pictures[0] = key
            num_units = pictures.units(torch.get_num_threads()).count(tile)
            works += [PictureWork((), (Encode(key, picture, 3, slot),))] * num_units
    rows = [core.BatchRow(each, 0, each.num_prompt, samples=True) for each in sequences]
    batches = [rows]
    for _ in range(2):
        for each in sequences:
            each.token_ids.append(len(each.token_ids) % 50)
        last = [len(each.token_ids) - 1 for each in sequences]
        batches.append(
            [core.BatchRow(*each, 1, samples=True) for each in zip(sequences, last, strict=True)]
        )
    return works, [core.Batch(tuple(each)) for each in batches]
