"""Facts of processors that cannot be honoured are refused, by the file and the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inference_svc.errors import UnsupportedModel
from inference_svc.pictures.processor import Form, Processor, read_processor
from inference_svc.pictures.sizes import Size, TileForm
from inference_svc.pictures.tiling import TooLong, make_tiles
from tests.support.pictures.models import (
    NAMES,
    PATCH,
    PROCESSORS,
    TILE,
    save_processor,
    tile_form,
)

FORM = TileForm(TILE, PATCH)


@pytest.mark.parametrize("name", NAMES)
def test_facts_travel_as_json(name: str, tmp_path: Path) -> None:
    save_processor(name, tmp_path)
    found = read_processor(tmp_path, tile_form(name))
    assert Processor.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_the_processors_own_file_may_have_it(tmp_path: Path) -> None:
    """Newer checkpoints have one file for all parts of a processor."""
    values = PROCESSORS["Llava"] | {"image_processor_type": "CLIPImageProcessorFast"}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": values}))
    found = read_processor(tmp_path, FORM)
    assert (found.form, found.shortest, found.crops) == (Form.WHOLE, TILE, True)


def test_sizes_may_be_numbers(tmp_path: Path) -> None:
    """As in older files."""
    save_processor("Llava", tmp_path, size=TILE, crop_size=TILE)
    assert read_processor(tmp_path, FORM).shortest == TILE
    save_processor("LlavaOfSiglip", tmp_path, size=TILE)
    assert read_processor(tmp_path, FORM).size == Size(TILE, TILE)


@pytest.mark.parametrize("name", NAMES)
def test_null_counts_as_left_out(name: str, tmp_path: Path) -> None:
    save_processor(name, tmp_path)
    expected = read_processor(tmp_path, tile_form(name))
    keys = ("resample", "rescale_factor", "image_mean", "image_std")
    save_processor(name, tmp_path, **dict.fromkeys(keys))
    assert read_processor(tmp_path, tile_form(name)) == expected


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Llava", {"image_processor_type": "ViTImageProcessor"}, "image_processor_type"),
        ("Llava", {"image_processor_type": None}, "image_processor_type"),
        ("Llava", {"do_rescale": False}, "do_rescale"),
        ("Llava", {"do_normalize": False}, "do_normalize"),
        ("Llava", {"do_resize": False}, "do_resize"),
        ("Llava", {"size": {"longest_edge": 3}}, "size"),
        ("Llava", {"size": {"shortest_edge": 0}}, "size"),
        ("Llava", {"size": {"shortest_edge": 1 << 20}}, "size"),
        ("Llava", {"size": {"shortest_edge": True}}, "size"),
        ("Llava", {"crop_size": {"height": 27, "width": 28}}, "crop_size"),
        ("Llava", {"do_center_crop": False}, "size"),
        ("Llava", {"do_center_crop": "no"}, "do_center_crop"),
        ("Llava", {"resample": 9}, "resample"),
        ("Llava", {"resample": True}, "resample"),
        ("Llava", {"resample": [2]}, "resample"),
        ("Llava", {"image_mean": [1, 2]}, "image_mean"),
        ("Llava", {"image_mean": [0.5, math.nan, 0.5]}, "image_mean"),
        ("Llava", {"image_mean": [0.5, -math.inf, 0.5]}, "image_mean"),
        ("Llava", {"image_mean": [True, False, True]}, "image_mean"),
        ("Llava", {"image_std": [0, 1, 1]}, "image_std"),
        ("Llava", {"image_std": [True, 1, 1]}, "image_std"),
        ("Llava", {"image_std": [math.nan, 1, 1]}, "image_std"),
        ("Llava", {"image_std": [10**400, 1, 1]}, "image_std"),
        ("Llava", {"rescale_factor": 0}, "rescale_factor"),
        ("Llava", {"rescale_factor": True}, "rescale_factor"),
        ("Llava", {"rescale_factor": math.nan}, "rescale_factor"),
        ("LlavaOfSiglip", {"size": {"height": TILE, "width": 9}}, "size"),
        ("Gemma3", {"size": {"height": TILE, "width": 9}}, "size"),
        ("Gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("Mistral3", {"patch_size": PATCH + 1}, "patch_size"),
        ("Mistral3", {"size": {"height": 9, "width": 9}}, "size"),
        ("Mistral3", {"size": {"longest_edge": 0}}, "size"),
        ("Mistral3", {"do_center_crop": True}, "do_center_crop"),
        ("Gemma4", {"do_normalize": True, "image_std": [0.5] * 3}, "do_normalize"),
        ("Gemma4", {"patch_size": 9}, "patch_size"),
        ("Gemma4", {"pooling_kernel_size": 3}, "pooling_kernel_size"),
        ("Gemma4", {"max_soft_tokens": 71}, "max_soft_tokens"),
        ("Gemma4", {"max_soft_tokens": 280}, "max_soft_tokens"),
        ("Idefics3", {"max_image_size": {"longest_edge": 9}}, "max_image_size"),
        ("Idefics3", {"size": {"height": 9, "width": 9}}, "size"),
        ("Qwen2_5_VL", {"image_processor_type": "CLIPImageProcessor"}, "image_processor_type"),
        ("Qwen2_5_VL", {"size": {"height": 9, "width": 9}}, "size"),
        ("Qwen2_5_VL", {"size": 9}, "size"),
        ("Qwen2_5_VL", {"size": {"shortest_edge": 9, "longest_edge": 8}}, "size"),
        ("Qwen2_5_VL", {"max_pixels": 1 << 26}, "max_pixels"),
        ("Qwen2_5_VL", {"patch_size": 16}, "patch_size"),
        ("Qwen2_5_VL", {"merge_size": 1}, "merge_size"),
        ("Qwen2_5_VL", {"temporal_patch_size": 1}, "temporal_patch_size"),
        ("Qwen2_5_VL", {"do_resize": False}, "do_resize"),
    ],
)
def test_what_is_not_computed_is_refused(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_processor(name, tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=f"preprocessor_config.json: {named} = "):
        read_processor(tmp_path, tile_form(name))


@pytest.mark.parametrize(
    ("text", "words"), [("[1]", "object"), ("{", "not JSON"), (" " * (1 << 20) + "{}", "object")]
)
def test_files_that_are_no_facts_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=words):
        read_processor(tmp_path, FORM)


def test_the_most_tiles_are_known(tmp_path: Path) -> None:
    save_processor("Idefics3", tmp_path)
    assert read_processor(tmp_path, FORM).max_tiles == 3 * 3 + 1
    save_processor("Idefics3", tmp_path, size={"longest_edge": 5000})
    assert read_processor(tmp_path, FORM).max_tiles == 74**2 + 1
    save_processor("Idefics3", tmp_path, do_image_splitting=False)
    assert read_processor(tmp_path, FORM).max_tiles == 1


@pytest.mark.parametrize("longest", [3 * 57, 3 * 57 + 1, 3 * 57 - 1, 3 * 57 - 2])
@pytest.mark.parametrize("size", [(90, 90), (90, 89), (89, 90), (3, 90)])
def test_no_picture_has_more_tiles(longest: int, size: tuple[int, int], tmp_path: Path) -> None:
    """Of tiles of odd sizes, too."""
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 57}}
    save_processor("Idefics3", tmp_path, **sizes)
    processor = read_processor(tmp_path, TileForm(57, PATCH))
    tiles = make_tiles(Image.new("RGB", size), processor, 1 << 20)
    assert len(tiles.pixels) // (3 * 57 * 57) <= processor.max_tiles


@pytest.mark.parametrize("bounds", [(56 * 56, 28 * 28 * 4), (1, 28 * 28), (90_000, 100_000)])
@pytest.mark.parametrize("size", [(200, 1), (199, 1), (3, 600), (31, 47), (1, 1), (2000, 3000)])
def test_no_free_picture_is_larger(
    bounds: tuple[int, int], size: tuple[int, int], tmp_path: Path
) -> None:
    """Narrow ones have more pixels than the bound, as in transformers."""
    edges = dict(zip(("shortest_edge", "longest_edge"), bounds, strict=True))
    save_processor("Qwen2_5_VL", tmp_path, size=edges)
    processor = read_processor(tmp_path, tile_form("Qwen2_5_VL"))
    tiles = make_tiles(Image.new("RGB", size), processor, 1 << 20)
    assert processor.makes(tiles.shape.tile)
    assert len(tiles.pixels) <= processor.max_bytes
    assert not processor.makes(Size(tiles.shape.tile.height + 1, tiles.shape.tile.width))


@pytest.mark.parametrize("size", [(1, 1), (3, 900), (900, 3), (31, 47), (2000, 3000), (1, 69)])
def test_a_picture_that_fills_has_no_more_pixels(size: tuple[int, int], tmp_path: Path) -> None:
    save_processor("Gemma4", tmp_path)
    processor = read_processor(tmp_path, tile_form("Gemma4"))
    tile = make_tiles(Image.new("RGB", size), processor, 1 << 20).shape.tile
    assert processor.makes(tile)
    assert tile.height * tile.width <= processor.max_tile_pixels == 70 * 28 * 28


def test_a_picture_may_be_too_narrow(tmp_path: Path) -> None:
    save_processor("Qwen2_5_VL", tmp_path)
    processor = read_processor(tmp_path, tile_form("Qwen2_5_VL"))
    with pytest.raises(TooLong):
        make_tiles(Image.new("RGB", (201, 1)), processor, 1 << 20)
